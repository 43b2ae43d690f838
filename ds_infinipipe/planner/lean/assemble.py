"""A choice of lean mode as a Plan."""

from __future__ import annotations

import time

from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.lean.bounds import lower_bound_s
from ds_infinipipe.planner.lean.choice import LeanChoice
from ds_infinipipe.planner.lower import lower_plan
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.schedule_arrays import simulate_schedule
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import ClusterSpec
from ds_infinipipe.planner.types import PipelinePlan, Plan, Prediction, SolverStats

__all__ = ["assemble_lean"]


def assemble_lean(
    choice: LeanChoice,
    lengths: tuple[int, ...],
    cost: CostModel,
    cluster: ClusterSpec,
    memory: MemoryModel,
    limit_bytes: int,
    settings: PlannerSettings,
    zero_stage: int,
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
    peaks = choice.arrays.peaks(schedule, choice.counts)
    chunks = choice.candidate.packed.chunks(memory.layout.sp)
    bound_s = lower_bound_s(lengths, cost)
    return Plan(
        model=memory.model,
        cluster=cluster,
        layout=memory.layout,
        lengths=lengths,
        alignment=settings.alignment,
        memory_limit_bytes=limit_bytes,
        chunks=chunks,
        pipelines=(pipeline,),
        streams=lower_plan((pipeline,), chunks, memory.layout, schedule.as_operations()),
        predicted=Prediction(
            simulated.makespan_s, simulated.bubble_ratio, tuple(int(p) for p in peaks)
        ),
        solver=SolverStats(
            mode=settings.mode,
            k=choice.candidate.k,
            status=choice.status,
            gap=1 - bound_s / simulated.makespan_s,
            time_s=time.perf_counter() - started_s,
            note=choice.note,
        ),
        zero_stage=zero_stage,
        loss_block_tokens=settings.loss_block_tokens,
        keeps_gathered=cost.keeps_gathered,
    )
