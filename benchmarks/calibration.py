"""Predicted against measured step times before and after calibrating, on this machine's CPU.

One rank, ZeRO-0, one thread; steps of different batches, each planned with the cluster at hand.

    OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu python benchmarks/calibration.py [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_infinipipe.launcher import become_only_rank
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.models import model_from_hf
from ds_infinipipe.planner.predict.fit import calibrated_cluster, fit_rows
from ds_infinipipe.profiling.layer import profile_layer
from ds_infinipipe.runtime.engine.initialize import initialize
from ds_infinipipe.runtime.engine.module import InfiniPipeModule
from ds_infinipipe.runtime.stage.batch import StepBatch

RESULT = Path(__file__).parent / "results" / "calibration.json"
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}


def main() -> int:
    """Calibrate, then run the same steps under both clusters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--budget-s", type=float, default=30.0)
    args = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    become_only_rank()
    device = torch.device("cpu")
    fit = fit_rows(profile_layer(MODEL, device=device, dtype=torch.float32, budget_s=args.budget_s))
    base = load_cluster("cpu-local")
    cluster = calibrated_cluster(fit, model_from_hf(MODEL), base)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        path.write_text(json.dumps(asdict(cluster)), encoding="utf-8")
        rows = [_measure(name, args.steps) for name in ("cpu-local", str(path))]
    for row, name in zip(rows, ("before", "after"), strict=True):
        row["cluster"] = name
        print(
            f"{name}: predicted / measured {row['median_ratio']:.3f}, spread of the ratio over "
            f"steps {row['spread']:.1%}"
        )
    body = {
        "command": " ".join(sys.argv),
        "fit_median_error": fit.median_error,
        "fit_worst_error": fit.worst_error,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(cluster: str, steps: int) -> dict[str, Any]:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": 0},
        "infinipipe": {
            "model": {"config": MODEL},
            "cluster": cluster,
            "planning": {"asynchronous": False},
        },
    }
    engine = initialize(model=InfiniPipeModule(config), config=config)[0]
    complete: list[float] = []  # when a step's gradients were; the optimizer is not predicted
    engine.before_step_hooks.append(lambda _: complete.append(time.process_time()))
    rng, ratios = np.random.default_rng(1), []
    for step in range(steps + 1):
        lengths = np.exp(rng.uniform(np.log(100), np.log(2500), 4)).astype(int)
        ids = [rng.integers(0, MODEL["vocab_size"], size=n) for n in lengths]
        batch = StepBatch.from_samples(ids, 8192, MODEL["vocab_size"])
        plan = engine.planning_task.solve(batch.lengths)
        before = time.process_time()
        engine.train_plan(plan, batch)
        taken_s = complete[-1] - before
        if step:
            ratios.append(plan.predicted.step_time_s / taken_s)
    engine.close()
    median = statistics.median(ratios)
    deviations = [abs(r / median - 1) for r in ratios]
    return {"median_ratio": median, "spread": statistics.median(deviations), "ratios": ratios}


if __name__ == "__main__":
    sys.exit(main())
