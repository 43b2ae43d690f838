"""Predicted against measured peak bytes of 60 plans: `python benchmarks/memory_truth.py`.

Prints one line per case and writes benchmarks/results/memory_truth.json. Takes some minutes on two
CPU cores.
"""

from __future__ import annotations

import itertools
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ds_infinipipe.checks.memory_truth import MemoryCase, MemoryDifference, compare_memory
from ds_infinipipe.runtime.ranks.local import run_local_ranks

RESULT = Path(__file__).parent / "results" / "memory_truth.json"
CASES = [
    MemoryCase("llama", 1, 1, zero_stage=0, random_plans=4, seed=1),
    MemoryCase("qwen3", 1, 1, num_kv_heads=4, random_plans=4, seed=2),
    MemoryCase("llama", 1, 1, is_bf16=True, random_plans=4, seed=3),
    MemoryCase("llama", 1, 1, is_bf16=True, fp8="tensor", random_plans=4, seed=11),
    MemoryCase("mistral", 1, 1, sliding_window=200, random_plans=4, seed=12),
    MemoryCase("llama", 1, 2, num_layers=6, random_plans=4, seed=4),
    MemoryCase("qwen3", 1, 2, zero_stage=0, num_layers=6, random_plans=4, seed=5),
    MemoryCase("llama", 2, 2, num_layers=8, num_kv_heads=4, random_plans=4, seed=6),
    MemoryCase("llama", 2, 2, zero_stage=0, num_layers=8, random_plans=4, seed=7),
    MemoryCase("qwen3", 2, 2, is_bf16=True, num_layers=8, random_plans=4, seed=8),
    MemoryCase("llama", 4, 1, num_layers=8, random_plans=4, seed=9),
    MemoryCase("qwen3", 4, 1, zero_stage=0, num_layers=8, num_kv_heads=4, random_plans=4, seed=10),
]


def _compare(cases: Sequence[MemoryCase]) -> list[list[MemoryDifference]]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    return [compare_memory(case) for case in cases]


def main() -> None:
    """Run the cases of every layout on local ranks and report."""
    rows: list[dict[str, Any]] = []
    print("model  pp x sp  ZeRO  type     states      step: median  range         plans")
    for (pp, sp), cases in itertools.groupby(CASES, key=lambda c: (c.pp, c.sp)):
        same_layout = list(cases)
        by_rank = run_local_ranks(_compare, pp * sp, same_layout)
        for index, case in enumerate(same_layout):
            found = [d for rank in by_rank[::sp] for d in rank[index]]
            rows.append({"case": asdict(case), "steps": [asdict(d) for d in found]})
            print(_line(case, found), flush=True)
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps({"summary": _summary(rows), "cases": rows}, indent=1) + "\n")
    print(json.dumps(_summary(rows)))


def _line(case: MemoryCase, found: Sequence[MemoryDifference]) -> str:
    errors = np.array([d.step_error for d in found])
    states = max((d.states_error for d in found), key=abs)
    kind = "bf16" if case.is_bf16 else "fp32"
    return (
        f"{case.model_type:6s} {case.pp} x {case.sp}    {case.zero_stage}     {kind}   "
        f"{states:+7.1%}      {np.median(errors):+7.1%}  {errors.min():+.1%} to "
        f"{errors.max():+.1%}  {case.random_plans + case.planned}"
    )


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    steps = [step for row in rows for step in row["steps"]]
    errors = np.array([s["predicted_step"] / s["measured_step"] - 1 for s in steps])
    planned = errors[[bool(s["is_planned"]) for s in steps]]
    totals = np.array(
        [
            (s["predicted_step"] + s["predicted_states"])
            / (s["measured_step"] + s["measured_states"])
            - 1
            for s in steps
        ]
    )
    return {
        "stage_steps": len(steps),
        "step_within_5_percent": float(np.mean(np.abs(errors) <= 0.05)),
        "step_within_10_percent": float(np.mean(np.abs(errors) <= 0.10)),
        "step_least": float(errors.min()),
        "step_median": float(np.median(errors)),
        "step_most": float(errors.max()),
        "planned_step_within_5_percent": float(np.mean(np.abs(planned) <= 0.05)),
        "total_within_5_percent": float(np.mean(np.abs(totals) <= 0.05)),
        "total_least": float(totals.min()),
        "total_most": float(totals.max()),
    }


if __name__ == "__main__":
    main()
