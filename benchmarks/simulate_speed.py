"""How long one candidate takes in the planner's inner loops, on one core, in a warm process.

Process time of building the operation lists, simulating, scanning the peaks and making the memory
rows, beside the readable implementations; then what the first call costs with and without a cache.

    python benchmarks/simulate_speed.py [--repeats 50] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.setup import make_layout, make_setup
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.order import shrinking_windows, slices_by_position
from ds_infinipipe.planner.plan.plan import PipelinePlan
from ds_infinipipe.planner.predict.ledger import Ledger
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.schedule import (
    build_schedule,
    shrinking_schedule,
    simulate_schedule,
)
from ds_infinipipe.planner.predict.time import CostModel

RESULT = Path(__file__).parent / "results" / "simulate_speed.json"
TESTS = Path(__file__).parents[1] / "tests"
SIZES = ((200, 4), (2000, 16))
TARGET_MS = {("simulate", 200): 0.5, ("simulate", 2000): 10.0, ("peaks", 200): 0.5}
TARGET_MS |= {("build", 200): 0.5}
LOAD = (
    "import time; t = time.process_time();"
    "from ds_infinipipe.planner.predict import schedule as s; s.load_kernels();"
    "print(time.process_time() - t)"
)


def make_chunks(num_chunks: int) -> tuple[Chunk, ...]:
    """Cut and whole sequences, four shorts beside every slice."""
    rng = np.random.default_rng(0)
    chunks: list[Chunk] = []
    sequence = 0
    while len(chunks) < num_chunks:
        num_slices = min(int(rng.choice([1, 1, 1, 1, 2, 4, 8])), num_chunks - len(chunks))
        length = 1024 * int(rng.integers(2, 9))
        for i in range(num_slices):
            slices = [Slice(sequence, i * length, length, i == num_slices - 1)]
            shorts = rng.integers(64, 1024, size=4).tolist()
            slices += [Slice(sequence + 1 + j, 0, n, True) for j, n in enumerate(shorts)]
            chunks.append(Chunk(tuple(slices), -sum(s.length for s in slices) % 8))
        sequence += 5
    return tuple(chunks)


def time_ms(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Process time after one call to warm up."""
    function()
    times = []
    for _ in range(repeats):
        started_ns = time.process_time_ns()
        function()
        times.append((time.process_time_ns() - started_ns) / 1e6)
    return {"median_ms": round(statistics.median(times), 4), "least_ms": round(min(times), 4)}


def measure(num_chunks: int, pp: int, repeats: int) -> dict[str, Any]:
    from oracles.orders import stage_operations
    from oracles.peak_bytes import peak_bytes
    from oracles.simulate import simulate
    from oracles.transfers import transfer_bytes

    model, chunks = BUILTIN_MODELS["llama-13b"], make_chunks(num_chunks)
    layout = make_layout(model, pp=pp, sp=8)
    setup = make_setup(model, BUILTIN_CLUSTERS["a800-80g-4x8"], layout)
    memory, cost = MemoryModel(setup), CostModel(setup)
    costs, ledger = cost.chunk_costs(chunks), Ledger(memory, chunks)
    schedule = shrinking_schedule(chunks, pp)
    counts = np.random.default_rng(1).integers(0, 2, (pp, num_chunks))
    limit = int(0.8 * ledger.peaks(schedule).max())
    rows = ledger.rows(schedule, limit)
    assert rows is not None
    forward, backward = tuple(schedule.forward.tolist()), tuple(schedule.backward.tolist())
    windows = shrinking_windows(pp, slices_by_position(chunks, backward))
    sizes, operations = np.array(windows), schedule.as_operations()
    hidden = [memory.input_bytes(chunk) for chunk in chunks]
    table = tuple(tuple(row) for row in counts[:, schedule.forward].tolist())
    pipeline = PipelinePlan(forward, backward, table, 8)
    streams = lower_plan([pipeline], chunks, layout, operations)
    times = {
        "forward_s": costs.forward_s,
        "backward_s": costs.backward_s,
        "recompute_s": costs.recompute_s,
        "p2p_s": costs.p2p_s,
    }
    assert simulate(streams, **times).makespan_s == (
        simulate_schedule(schedule, costs, counts).makespan_s
    )
    steps: dict[str, Callable[[], object]] = {
        "build": lambda: build_schedule(forward, backward, sizes),
        "simulate": lambda: simulate_schedule(schedule, costs, counts),
        "peaks": lambda: ledger.peaks(schedule, counts),
        "rows": lambda: ledger.rows(schedule, limit),
        "order and build": lambda: shrinking_schedule(chunks, pp),
        "chunk costs": lambda: cost.chunk_costs(chunks),
        "bytes, nothing recomputed": lambda: Ledger(memory, chunks).peaks(schedule),
        "bytes, any counts": lambda: Ledger(memory, chunks).amounts(is_split=False),
        "readable build": lambda: [stage_operations(forward, backward, w) for w in windows],
        "readable simulate": lambda: simulate(streams, **times),
        "readable peaks": lambda: [
            peak_bytes(memory, stage, row, chunks, counts[stage], transfers)
            for stage, (row, transfers) in enumerate(
                zip(operations, transfer_bytes(operations, hidden), strict=True)
            )
        ],
    }
    measured = {
        name: time_ms(step, repeats if not name.startswith("readable") else 3)
        for name, step in steps.items()
    }
    for (name, size), target_ms in TARGET_MS.items():
        if size == num_chunks:
            measured[name]["target_ms"] = target_ms
    return {
        "chunks": num_chunks,
        "pp": pp,
        "memory_rows": sum(part.need.size for part in rows),
        "steps": measured,
    }


def load_s() -> dict[str, float]:
    """Process seconds until the kernels are ready in a new process, without and with a cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        times = [
            float(subprocess.check_output([sys.executable, "-c", LOAD], env=environment))
            for _ in range(2)
        ]
    return {"compiled": round(times[0], 2), "from_cache": round(times[1], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = [measure(num_chunks, pp, args.repeats) for num_chunks, pp in SIZES]
    for result in results:
        print(f"{result['chunks']} chunks, pp {result['pp']}, {result['memory_rows']} rows")
        for name, step in result["steps"].items():
            target = f"  target {step['target_ms']}" if "target_ms" in step else ""
            print(f"  {name:26s} median {step['median_ms']:9.3f} ms{target}")
    report = {
        "command": "python benchmarks/simulate_speed.py",
        "load_average": os.getloadavg(),
        "kernels_ready_s": load_s(),
        "sizes": results,
    }
    print(f"kernels ready after {report['kernels_ready_s']} s of process time")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
