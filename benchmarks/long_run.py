"""Hundreds of steps on 4 CPU ranks with a new plan each: does anything grow?

Every rank notes its resident memory, open files and threads; after the warm-up all must stay flat,
and nothing may be left in shared memory. Plans come from the worker process, as in training.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python benchmarks/long_run.py [--steps 500]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULT = Path(__file__).parent / "results" / "long_run.json"
WARM_UP = 100
MOST_GROWTH = 0.02


def main() -> int:
    """Run, print a table by rank, write the result; 1 if something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    from ds_infinipipe.runtime.ranks.local import run_local_ranks

    shared_before = set(os.listdir("/dev/shm"))
    by_rank = run_local_ranks(_train, 4, args.steps)
    left = sorted(set(os.listdir("/dev/shm")) - shared_before)
    failed = bool(left)
    for rank, rows in enumerate(by_rank):
        warm = next(r for r in rows if r["step"] >= min(WARM_UP, args.steps // 2))
        last = rows[-1]
        growth = last["resident_mib"] / warm["resident_mib"] - 1.0
        failed |= growth > MOST_GROWTH or last["files"] > warm["files"]
        failed |= last["threads"] > warm["threads"]
        print(
            f"rank {rank}: {warm['resident_mib']:.0f} MiB at step {warm['step']}, "
            f"{last['resident_mib']:.0f} at {last['step']} ({growth:+.1%}); files "
            f"{warm['files']} -> {last['files']}, threads {warm['threads']} -> {last['threads']}; "
            f"{last['plans']} different plans, loss {rows[0]['loss']:.3f} -> {last['loss']:.3f}"
        )
    print(f"left in shared memory: {left or 'nothing'}")
    body = {"command": " ".join(sys.argv), "left_in_shared_memory": left, "ranks": by_rank}
    RESULT.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _train(steps: int) -> list[dict[str, Any]]:
    import psutil

    from ds_infinipipe.checks import exactness
    from ds_infinipipe.checks.exactness import Case

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    case = Case("qwen3", 2, 2, num_sequences=12, max_tokens=120, learning_rate=1e-3)
    config = exactness.make_config(case)
    config["infinipipe"]["planning"]["asynchronous"] = True
    engine = exactness.engine_from_config(config, case.dtype)
    batches = _batches(case)
    process, digests, rows = psutil.Process(), set(), []
    for step in range(1, steps + 1):
        loss = float(engine.train_batch(batches))
        assert engine.plan is not None
        digests.add(engine.plan.digest())
        if step % 25 == 0 or step == steps:
            rows.append(
                {
                    "step": step,
                    "resident_mib": process.memory_info().rss / 2**20,
                    "files": process.num_fds(),
                    "threads": threading.active_count(),
                    "plans": len(digests),
                    "loss": loss,
                }
            )
    engine.close()
    return rows


def _batches(case: Any) -> Iterator[list[np.ndarray]]:
    """Endless batches of sequences that repeat a short pattern, so that there is something to
    learn; the same on every rank."""
    rng = np.random.default_rng(case.seed)
    while True:
        batch = []
        for _ in range(int(rng.integers(3, case.num_sequences + 1))):
            length = int(rng.integers(2, case.max_tokens + 1))
            batch.append((int(rng.integers(0, 5)) + np.arange(length)) % case.vocab_size)
        yield batch


if __name__ == "__main__":
    sys.exit(main())
