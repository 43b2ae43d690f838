"""What splitting the backward into input and weight gradients could gain on lean plans.

Simulated only; the executor does not do it. A weight gradient (half of the backward's linear work)
runs when the stage would idle, else as soon as more than `pending` of them wait; with 0 it runs
right after the input gradient was sent. Memory of waiting
ones is not counted, so the gain is an upper estimate for the plan at hand.

    python benchmarks/lean_zero_bubble.py [--seeds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from lean_quality import Case, plan_case
from numpy.typing import NDArray

from ds_infinipipe.planner.costs import ChunkCosts, CostModel
from ds_infinipipe.planner.types import Op, Plan

RESULT = Path(__file__).parent / "results" / "lean_zero_bubble.json"
PENDING = (0, 1, 2, 4, 8)
CASES = (
    Case("github-a", "llama-13b", 65536, 72.0),
    Case("github-b", "llama-13b", 65536, 72.0),
    Case("commoncrawl", "llama-13b", 65536, 72.0),
)


class _Stage:
    """Where a stage stands; `waiting` are chunks whose weight gradients are to be done."""

    def __init__(
        self, number: int, operations: list[tuple[Op, int]], weight_s: NDArray[np.float64]
    ) -> None:
        self.number = number
        self.operations = operations
        self.weight_s = weight_s
        self.clock_s = 0.0
        self.done = 0
        self.waiting: list[int] = []

    @property
    def following(self) -> tuple[int, Op, int]:
        op, chunk = self.operations[self.done]
        return self.number, op, chunk

    def work_off(self, until_s: float, most: int) -> None:
        """Weight gradients that mostly fit before `until_s`, and those beyond `most`."""
        while self.waiting:
            next_s = self.weight_s[self.waiting[0]]
            fits = self.clock_s + 0.5 * next_s <= until_s and self.clock_s < until_s
            if not fits and len(self.waiting) <= most:
                return
            self.clock_s += next_s
            self.waiting.pop(0)


def split_makespan_s(
    plan: Plan, costs: ChunkCosts, weight_s: NDArray[np.float64], most: int
) -> float:
    """Makespan of the plan's order with at most `most` weight gradients waiting per stage."""
    stages = [
        _Stage(p, [(i.op, i.chunk) for i in s if i.op in (Op.FORWARD, Op.BACKWARD)], weight_s[p])
        for p, s in enumerate(plan.streams)
    ]
    arrival = {(0, Op.FORWARD, chunk): 0.0 for chunk in range(len(plan.chunks))}
    while True:
        starts = [
            (max(stage.clock_s, arrival[stage.following]), p)
            for p, stage in enumerate(stages)
            if stage.done < len(stage.operations) and stage.following in arrival
        ]
        if not starts:
            break
        start_s, p = min(starts)
        stage = stages[p]
        _, op, chunk = stage.following
        stage.done += 1
        stage.work_off(start_s, most)
        begin_s = max(stage.clock_s, arrival[p, op, chunk])
        if op is Op.FORWARD:
            stage.clock_s = begin_s + costs.forward_s[p, chunk]
            is_last = p == len(stages) - 1
            to = (p, Op.BACKWARD, chunk) if is_last else (p + 1, op, chunk)
            arrival[to] = stage.clock_s + (0.0 if is_last else costs.p2p_s[chunk])
        else:
            stage.clock_s = begin_s + costs.backward_s[p, chunk] - weight_s[p, chunk]
            arrival[p - 1, op, chunk] = stage.clock_s + costs.p2p_s[chunk]
            stage.waiting.append(chunk)
            stage.work_off(-math.inf, most)
    for stage in stages:
        stage.work_off(math.inf, 0)
    return max(stage.clock_s for stage in stages)


def gains(case: Case, seed: int) -> dict[str, float]:
    plan = plan_case(case, seed, "lean")
    cost = CostModel.of_plan(plan)
    costs = cost.chunk_costs(plan.chunks)
    tokens = np.array([chunk.padded_tokens for chunk in plan.chunks], dtype=np.float64)
    layers = np.array(plan.layout.stage_layers, dtype=np.float64)[:, None]
    weight_s = layers * cost.coefficients.linear_s * tokens[None]
    whole_s = split_makespan_s(plan, costs, 0.0 * weight_s, 0)
    assert math.isclose(whole_s, plan.predicted.step_time_s) or any(
        any(row) for pipeline in plan.pipelines for row in pipeline.recompute
    )
    return {
        str(most): round(float(1 - split_makespan_s(plan, costs, weight_s, most) / whole_s), 4)
        for most in PENDING
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        for seed in range(args.seeds):
            found = gains(case, seed)
            rows.append({"lengths": case.lengths, "seed": seed, "gain_by_pending": found})
            print(case.lengths, seed, found, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/lean_zero_bubble.py --seeds {args.seeds}"
    args.out.write_text(json.dumps({"command": command, "plans": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
