"""Our planner with one of its parts taken away (V-E), and whole."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from ds_infinipipe.baselines.packing import fixed_chunks
from ds_infinipipe.baselines.pipeline import (
    PipelineRun,
    combine_replicas,
    exposed_sum_s,
)
from ds_infinipipe.baselines.result import (
    PAPER,
    TUNED,
    BaselineResult,
    Workload,
    infeasible,
)
from ds_infinipipe.errors import InfeasiblePlanError
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.replica_sum import settled_times, step_time_s
from ds_infinipipe.planner.predict.schedule import pipeline_schedule
from ds_infinipipe.planner.predict.simulate import break_down, break_down_plan, forecast_streams
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.layouts import plan_replicas, search_layouts
from ds_infinipipe.planner.search.paper.chunkings import Candidate, Chunking
from ds_infinipipe.planner.search.replicas import split_batch

__all__ = [
    "full_checkpointing",
    "of_plans",
    "ours",
    "planned",
    "without_balanced_chunking",
    "without_checkpointing",
]

WITHOUT_CHUNKING = "without balanced chunking"


def ours(workload: Workload) -> tuple[BaselineResult, ...]:
    """Every planning mode there is, that of `workload.settings` first.

    Each searches all layouts where `workload` has others to choose from.
    """
    field = PlannerSettings.model_fields["mode"]
    chosen = workload.settings.mode
    modes = [chosen, *(mode for mode in get_args(field.annotation) if mode != chosen)]
    return tuple(_in_mode(workload, mode) for mode in modes)


def _in_mode(workload: Workload, mode: str) -> BaselineResult:
    name, configuration = f"ours, {mode} mode", PAPER if mode == PAPER else TUNED
    if not workload.other_layouts:
        return planned(workload, name, configuration, {"mode": mode})
    try:
        search = search_layouts(
            workload.lengths,
            workload.setup,
            workload.settings.model_copy(update={"mode": mode}),
            num_devices=workload.num_devices,
        )
    except InfeasiblePlanError as error:
        return infeasible(name, configuration, str(error))
    return of_plans(workload, name, configuration, search.best.plans)


def without_checkpointing(workload: Workload) -> tuple[BaselineResult, ...]:
    """Nothing is recomputed; what does not fit is cut finer ("w/o ckpt")."""
    return (planned(workload, "without checkpointing", TUNED, {"recompute": "none"}),)


def full_checkpointing(workload: Workload) -> tuple[BaselineResult, ...]:
    """Every layer is recomputed ("full ckpt")."""
    return (planned(workload, "full checkpointing", TUNED, {"recompute": "full"}),)


def planned(
    workload: Workload, name: str, configuration: str, changes: dict[str, object]
) -> BaselineResult:
    """What `plan_batch` predicts with some settings changed."""
    settings = workload.settings.model_copy(update=changes)
    try:
        plans = tuple(plan_replicas(workload.lengths, workload.setup, settings))
    except InfeasiblePlanError as error:
        return infeasible(name, configuration, str(error))
    return of_plans(workload, name, configuration, plans)


def of_plans(
    workload: Workload, name: str, configuration: str, plans: tuple[Plan, ...]
) -> BaselineResult:
    """Result of one plan per replica; their layout may differ from the workload's."""
    layout = plans[0].layout
    runs = [_run_of_plan(plan) for plan in plans]
    busiest = max(plans, key=lambda plan: plan.predicted.step_time_s)
    exposed_s = step_time_s(plans) - busiest.predicted.step_time_s
    dp = f", dp {layout.dp}" if layout.dp > 1 else ""
    note = (
        f"pp {layout.pp}, sp {layout.sp}{dp}, K = {busiest.solver.k}, {len(busiest.chunks)} chunks"
    )
    return combine_replicas(name, configuration, workload, runs, layout.dp, exposed_s, note)


def _run_of_plan(plan: Plan) -> PipelineRun:
    predicted = plan.predicted
    shares = break_down_plan(plan)
    return PipelineRun(
        predicted.step_time_s,
        predicted.step_time_s * (1.0 - predicted.bubble_ratio),
        shares.communication_s,
        shares.recompute_s,
        max(predicted.peak_bytes),
        0,
    )


def without_balanced_chunking(workload: Workload) -> tuple[BaselineResult, ...]:
    """Long sequences evenly split, short ones packed to a fixed length ("w/o wbc").

    Grouping and recomputation stay those of the paper mode. In the paper's configuration the number
    of slices is chosen by the proxy of Eq. 13, tuned by simulation.
    """
    return (_unbalanced(workload, PAPER), _unbalanced(workload, TUNED))


def _unbalanced(workload: Workload, configuration: str) -> BaselineResult:
    layout = workload.setup.layout
    cost = CostModel(workload.setup)
    runs: list[PipelineRun] = []
    slices: list[int] = []
    for share in split_batch(workload.lengths, layout.dp, cost):
        if not share:
            continue
        part = replace(workload, lengths=tuple(workload.lengths[i] for i in share))
        candidates = list(_candidates(part, cost))
        if not candidates:
            return infeasible(WITHOUT_CHUNKING, configuration, "no chunk size fits the memory")
        if configuration == PAPER:
            best = min(candidates, key=lambda c: c.proxy_s)
            run = _simulate(best, cost)
        else:
            simulated = [(_simulate(c, cost), c) for c in candidates]
            run, best = min(simulated, key=lambda entry: entry[0].step_time_s)
        runs.append(run)
        slices.append(best.chunking.k)
    exposed_s = exposed_sum_s(workload.setup, runs)
    note = f"K = {max(slices)}"
    return combine_replicas(
        WITHOUT_CHUNKING, configuration, workload, runs, layout.dp, exposed_s, note
    )


def _candidates(workload: Workload, cost: CostModel) -> Iterable[Candidate]:
    setup, settings = workload.setup, workload.settings
    memory, layout, unit = MemoryModel(setup), setup.layout, setup.unit
    for k in range(1, min(settings.slice_limit(layout.pp), -(-workload.longest // unit)) + 1):
        size = unit * math.ceil(workload.longest / k / unit)
        chunks = fixed_chunks(workload.lengths, size, unit, layout.sp, is_even=True)
        candidate = Chunking.of(k, chunks, cost, memory, settings).group()
        if candidate is not None:
            yield candidate


def _simulate(candidate: Candidate, cost: CostModel) -> PipelineRun:
    chunking = candidate.chunking
    layout, costs = chunking.memory.layout, chunking.costs
    pipelines = [solved.plan() for solved in candidate.pipelines]
    operations = pipeline_schedule(pipelines, layout.pp).as_operations()
    streams = lower_plan(pipelines, chunking.chunks, layout, operations)
    timeline = forecast_streams(streams, costs)
    shares = break_down(streams, chunking.chunks, cost)
    peaks = [s.memory.peaks(s.solution.counts(s.memory)) for s in candidate.pipelines]
    return PipelineRun(
        timeline.makespan_s,
        sum(timeline.busy_s) / layout.pp,
        shares.communication_s,
        shares.recompute_s,
        max(int(stage.max()) for stage in peaks),
        0,
        settled_times(timeline, costs, layout),
    )
