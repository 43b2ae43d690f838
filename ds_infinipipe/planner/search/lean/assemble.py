"""A choice of lean mode as a Plan, and what no plan can beat: the most loaded stage's work."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.plan import PipelinePlan, Plan, Prediction, SolverStats
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.schedule import simulate_schedule
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.lean.candidates import LeanChoice

__all__ = ["assemble_lean", "lower_bound_s"]


def lower_bound_s(lengths: Sequence[int], cost: CostModel) -> float:
    """Seconds of compute and all-to-all of the most loaded stage, whatever chunks and order are.

    No fixed cost per chunk, latency, gather, transfer, padding, recomputation or bubble.
    """
    sizes = np.array(lengths, dtype=np.float64)
    c = cost.coefficients
    layer_s = (3 * c.linear_s + 2 * c.all2all_s) * sizes.sum()
    layer_s += (c.attention_forward_s + c.attention_backward_s) * cost.area.before(sizes).sum()
    stages_s = [layers * layer_s for layers in cost.layout.stage_layers]
    stages_s[-1] += 3 * c.logits_s * sizes.sum()
    return float(max(stages_s))


def assemble_lean(
    choice: LeanChoice,
    lengths: tuple[int, ...],
    cost: CostModel,
    memory: MemoryModel,
    mode: str,
    started_s: float,
) -> Plan:
    """One pipeline, lowered and predicted; `solver.gap` is what is left to the lower bound."""
    schedule = choice.candidate.schedule
    pipeline = PipelinePlan(
        tuple(schedule.forward.tolist()),
        tuple(schedule.backward.tolist()),
        tuple(tuple(row) for row in choice.counts[:, schedule.forward].tolist()),
        int(choice.candidate.packed.slices.max()),
    )
    simulated = simulate_schedule(schedule, choice.candidate.costs, choice.counts)
    peaks = choice.ledger.peaks(schedule, choice.counts)
    chunks = choice.candidate.packed.chunks(memory.layout.sp)
    bound_s = lower_bound_s(lengths, cost)
    return Plan(
        setup=memory.setup,
        lengths=lengths,
        chunks=chunks,
        pipelines=(pipeline,),
        streams=lower_plan((pipeline,), chunks, memory.layout, schedule.as_operations()),
        predicted=Prediction(
            simulated.makespan_s, simulated.bubble_ratio, tuple(int(p) for p in peaks)
        ),
        solver=SolverStats(
            mode=mode,
            k=choice.candidate.k,
            status=choice.status,
            gap=1 - bound_s / simulated.makespan_s,
            time_s=time.perf_counter() - started_s,
            note=choice.note,
        ),
    )
