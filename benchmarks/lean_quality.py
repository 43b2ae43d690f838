"""How near lean plans come to the lower bound, and what they gain on the paper's planner.

Simulated on one core from the cluster's constants, never measured on a device: a800-80g-4x8,
pp 4, sp 8, 512 synthetic lengths of which one has the full context. `over_bound` is the step time
over the work of the most loaded stage, minus 1.

    python benchmarks/lean_quality.py [--seeds 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import InfiniPipeError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout, make_setup
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.lean.assemble import lower_bound_s
from ds_infinipipe.planner.verify.frame import verify_plan

RESULT = Path(__file__).parent / "results" / "lean_quality.json"
NUM_SEQUENCES = 512


@dataclass(frozen=True)
class Case:
    """A table row; targets are fractions, None where there is none."""

    lengths: str
    model: str
    context: int
    memory_gib: float
    most_over_bound: float | None = None
    least_gain: float | None = None


CASES = (
    Case("github-a", "llama-13b", 65536, 72.0, most_over_bound=0.05),
    Case("github-b", "llama-13b", 65536, 72.0, most_over_bound=0.06, least_gain=0.10),
    Case("commoncrawl", "llama-13b", 65536, 72.0, most_over_bound=0.08),
    Case("github-a", "llama-13b", 65536, 40.0),
    Case("github-b", "llama-13b", 65536, 40.0),
    Case("commoncrawl", "llama-13b", 65536, 40.0),
    Case("github-b", "llama-13b", 65536, 24.0),
    Case("github-b", "llama-30b", 98304, 72.0, least_gain=0.15),
)


def plan_case(case: Case, seed: int, mode: str, **knobs: object) -> Plan:
    model = BUILTIN_MODELS[case.model]
    lengths = sample_lengths(case.lengths, NUM_SEQUENCES, case.context, np.random.default_rng(seed))
    lengths[0] = case.context
    setup = make_setup(
        model,
        BUILTIN_CLUSTERS["a800-80g-4x8"],
        make_layout(model, pp=4, sp=8),
        memory_limit_gib=case.memory_gib,
    )
    settings = PlannerSettings.model_validate({"mode": mode, **knobs})
    return plan_batch(lengths.tolist(), setup, settings)


def measure(case: Case, seed: int) -> dict[str, Any]:
    plans = {mode: plan_case(case, seed, mode) for mode in ("lean", "paper")}
    lean, paper = plans["lean"], plans["paper"]
    bound_s = lower_bound_s(lean.lengths, CostModel(lean.setup))
    step_s, paper_s = lean.predicted.step_time_s, paper.predicted.step_time_s
    return {
        "seed": seed,
        "bound_s": round(bound_s, 3),
        "lean_s": round(step_s, 3),
        "paper_s": round(paper_s, 3),
        "over_bound": round(step_s / bound_s - 1, 4),
        "paper_over_bound": round(paper_s / bound_s - 1, 4),
        "gain": round(1 - step_s / paper_s, 4),
        "bubble": round(lean.predicted.bubble_ratio, 4),
        "paper_bubble": round(paper.predicted.bubble_ratio, 4),
        "k": lean.solver.k,
        "chunks": len(lean.chunks),
        "recomputed_layers": sum(sum(row) for p in lean.pipelines for row in p.recompute),
        "peak_gib": round(max(lean.predicted.peak_bytes) / 2**30, 2),
        "is_accepted": _is_accepted(lean),
        "digest": lean.digest()[:16],
    }


def _is_accepted(plan: Plan) -> bool:
    try:
        verify_plan(plan)
    except InfiniPipeError as error:
        print(f"rejected: {error}", file=sys.stderr)
        return False
    return True


def summarize(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    means = {
        name: round(statistics.fmean(row[name] for row in rows), 4)
        for name in ("over_bound", "paper_over_bound", "gain", "bubble", "paper_bubble")
    }
    return {
        "case": vars(case),
        **means,
        "worst_over_bound": max(row["over_bound"] for row in rows),
        "worst_bubble": max(row["bubble"] for row in rows),
        "least_gain": min(row["gain"] for row in rows),
        "rejected_plans": sum(not row["is_accepted"] for row in rows),
        "misses": list(_misses(case, means, rows)),
        "seeds": rows,
    }


def _misses(case: Case, means: dict[str, float], rows: list[dict[str, Any]]) -> Iterator[str]:
    if case.most_over_bound is not None and means["over_bound"] > case.most_over_bound:
        yield f"mean {means['over_bound']} over the bound, target {case.most_over_bound}"
    if case.most_over_bound is not None and means["bubble"] > 0.06:
        yield f"mean bubble {means['bubble']}, target 0.06"
    if case.least_gain is not None and means["gain"] < case.least_gain:
        yield f"mean gain {means['gain']}, target {case.least_gain}"
    if not all(row["is_accepted"] for row in rows):
        yield "a plan was rejected by the verifier"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    print("lengths      model      context  GiB   over LB (worst)   paper   gain (least)  bubble")
    tables = []
    for case in CASES:
        table = summarize(case, [measure(case, seed) for seed in range(args.seeds)])
        tables.append(table)
        print(
            f"{case.lengths:12} {case.model:10} {case.context:7} {case.memory_gib:4.0f}   "
            f"{table['over_bound']:7.2%} ({table['worst_over_bound']:.2%})  "
            f"{table['paper_over_bound']:7.2%}  {table['gain']:6.2%} ({table['least_gain']:.2%})  "
            f"{table['bubble']:6.2%}  {'; '.join(table['misses'])}",
            flush=True,
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/lean_quality.py --seeds {args.seeds}"
    args.out.write_text(json.dumps({"command": command, "tables": tables}, indent=1) + "\n")
    return int(any(table["misses"] for table in tables))


if __name__ == "__main__":
    sys.exit(main())
