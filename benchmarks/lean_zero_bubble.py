"""What splitting backwards into input and weight gradients gains on lean plans, memory counted.

Simulated from the cluster's constants as in lean_quality.py. The gain is the share of the step that
plans without splits take longer.

    OMP_NUM_THREADS=1 python benchmarks/lean_zero_bubble.py [--seeds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from lean_quality import Case, plan_case

from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.planner.verify.frame import verify_plan

RESULT = Path(__file__).parent / "results" / "lean_zero_bubble.json"
CASES = tuple(
    Case(law, "llama-13b", 65536, memory_gib)
    for memory_gib in (72.0, 40.0)
    for law in ("github-a", "github-b", "commoncrawl")
)


def main() -> int:
    """Plan every case both ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    plan_case(CASES[0], 0, "lean")  # loads the kernels
    rows = [_measure(case, seed) for case in CASES for seed in range(args.seeds)]
    for row in rows:
        print(
            f"{row['lengths']:12} seed {row['seed']} {row['memory_gib']:3.0f} GiB  gain "
            f"{row['gain']:.2%}  bubble {row['bubble_whole']:.2%} -> {row['bubble_split']:.2%}  "
            f"{row['split_backwards']} of {row['backwards']} split  peak {row['peak_gib_whole']} "
            f"-> {row['peak_gib_split']} GiB  {row['cpu_s_whole']} -> {row['cpu_s_split']} s"
        )
    command = f"OMP_NUM_THREADS=1 python benchmarks/lean_zero_bubble.py --seeds {args.seeds}"
    args.out.write_text(json.dumps({"command": command, "plans": rows}, indent=1) + "\n")
    return 0


def _measure(case: Case, seed: int) -> dict[str, Any]:
    plans: dict[str, Plan] = {}
    cpu_s: dict[str, float] = {}
    for name, setting in (("whole", "never"), ("split", "auto")):
        started_s = time.process_time()
        plans[name] = plan_case(case, seed, "lean", split_backward=setting)
        cpu_s[name] = round(time.process_time() - started_s, 3)
        verify_plan(plans[name])
    whole, split = plans["whole"], plans["split"]
    operations = [i.op for stream in split.streams for i in stream]
    row: dict[str, Any] = {
        "lengths": case.lengths,
        "seed": seed,
        "memory_gib": case.memory_gib,
        "gain": round(1 - split.predicted.step_time_s / whole.predicted.step_time_s, 4),
        "split_backwards": operations.count(Op.BACKWARD_WEIGHT),
        "backwards": operations.count(Op.BACKWARD_WEIGHT) + operations.count(Op.BACKWARD),
    }
    for name, plan in plans.items():
        row[f"bubble_{name}"] = round(plan.predicted.bubble_ratio, 4)
        row[f"peak_gib_{name}"] = round(max(plan.predicted.peak_bytes) / 2**30, 2)
        row[f"cpu_s_{name}"] = cpu_s[name]
    return row


if __name__ == "__main__":
    sys.exit(main())
