"""How long a plan takes, from starting Python to the verified plan, on one core.

512 GitHub-like lengths, llama-13b on 4 x 8 A800, pp 4, sp 8, context 65536. The step times in the
result are simulated from the cluster's constants, never measured on a device.

    python benchmarks/plan_speed.py [--seeds 3] [--memory-gib 72 40 30] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "plan_speed.json"
CONTEXT = 65536
NUM_SEQUENCES = 512
COLUMNS = (
    ("lengths", 10),
    ("seed", 4),
    ("memory_gib", 10),
    ("wall_s", 7),
    ("cpu_s", 6),
    ("plan_s", 7),
    ("k", 3),
    ("chunks", 6),
    ("pipelines", 9),
    ("recomputed_layers", 17),
    ("status", 8),
    ("cp_sat_calls", 12),
    ("peak_gib", 8),
    ("step_time_s", 11),
    ("bubble_ratio", 12),
)


def plan_once(law: str, seed: int, memory_gib: float) -> dict[str, Any]:
    """Plan in this process; counts CP-SAT solves from outside the planner."""
    started_s = time.perf_counter()
    import numpy as np

    from ds_infinipipe.data.lengths import sample_lengths
    from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
    from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
    from ds_infinipipe.planner.facts.settings import PlannerSettings
    from ds_infinipipe.planner.facts.setup import make_layout, make_setup
    from ds_infinipipe.planner.search.batch import plan_batch
    from ds_infinipipe.planner.search.paper import recompute

    calls = 0
    cp_sat = recompute._cp_sat

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return cp_sat(*args)

    recompute._cp_sat = counted
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in sample_lengths(law, NUM_SEQUENCES, CONTEXT, rng)]
    lengths[0] = CONTEXT
    model = BUILTIN_MODELS["llama-13b"]
    setup = make_setup(
        model,
        BUILTIN_CLUSTERS["a800-80g-4x8"],
        make_layout(model, pp=4, sp=8),
        memory_limit_gib=memory_gib,
    )
    plan = plan_batch(lengths, setup, PlannerSettings(mode="paper"))
    peak_gib = max(plan.predicted.peak_bytes) / 2**30
    assert peak_gib <= memory_gib
    return {
        "plan_s": round(time.perf_counter() - started_s, 3),
        "k": plan.solver.k,
        "chunks": len(plan.chunks),
        "pipelines": len(plan.pipelines),
        "recomputed_layers": sum(sum(row) for p in plan.pipelines for row in p.recompute),
        "status": plan.solver.status,
        "gap": round(plan.solver.gap, 4),
        "cp_sat_calls": calls,
        "peak_gib": round(peak_gib, 2),
        "step_time_s": round(plan.predicted.step_time_s, 3),
        "bubble_ratio": round(plan.predicted.bubble_ratio, 4),
        "digest": plan.digest(),
    }


def measure(law: str, seed: int, memory_gib: float) -> dict[str, Any]:
    """Plan in a fresh interpreter bound to one core; `wall_s` and `cpu_s` include the start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_s = time.perf_counter()
    child = subprocess.run(
        [sys.executable, __file__, "--child", law, str(seed), str(memory_gib)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wall_s = time.perf_counter() - started_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "lengths": law,
        "seed": seed,
        "memory_gib": memory_gib,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        **json.loads(child.stdout),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--memory-gib", type=float, nargs="+", default=[72.0, 40.0, 30.0])
    parser.add_argument("--lengths", nargs="+", default=["github-a", "github-b"])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        law, seed, memory_gib = args.child
        print(json.dumps(plan_once(law, int(seed), float(memory_gib))))
        return
    print("  ".join(f"{name:>{width}}" for name, width in COLUMNS))
    rows = []
    for law in args.lengths:
        for memory_gib in args.memory_gib:
            for seed in range(args.seeds):
                row = measure(law, seed, memory_gib)
                print("  ".join(f"{row[name]!s:>{width}}" for name, width in COLUMNS), flush=True)
                rows.append(row)
    load = os.getloadavg()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"load_average": load, "plans": rows}, indent=1) + "\n")
    print(f"slowest {max(row['wall_s'] for row in rows)} s, load average {load[0]:.1f}")


if __name__ == "__main__":
    main()
