"""Lengths of one batch to a verified plan: the one door to the planner."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from ds_infinipipe.errors import DataError
from ds_infinipipe.planner.candidates import Candidate, Chunking
from ds_infinipipe.planner.capacity import Question
from ds_infinipipe.planner.chunkings import iterate_chunkings
from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.deadline import Deadline
from ds_infinipipe.planner.forecast import forecast_streams
from ds_infinipipe.planner.gradient_sum import GradientSums
from ds_infinipipe.planner.infeasible import check_states, infeasible_plan
from ds_infinipipe.planner.lean.assemble import assemble_lean
from ds_infinipipe.planner.lean.search import search_lean
from ds_infinipipe.planner.lower import lower_plan
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.order import pipeline_operations
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import ClusterSpec, Layout, ModelSpec
from ds_infinipipe.planner.types import (
    Instruction,
    Plan,
    Prediction,
    SolverStats,
)
from ds_infinipipe.planner.verify import verify_plan

__all__ = ["plan_batch"]

_LOGGER = logging.getLogger(__name__)


def plan_batch(
    lengths: Sequence[int],
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: Layout,
    settings: PlannerSettings | None = None,
    zero_stage: int = 3,
) -> Plan:
    """Plan one optimizer step over sequences of `lengths` tokens; verified before it is returned.

    Mode `lean`: see lean/search.py; where no merged stream fits, as in paper
    mode. Mode `paper`: for every K up to the slice limit, chunks by Algorithm 1, pipelines
    by Eq. 14, recomputation by Algorithm 2. The K with the smallest proxy of Eq. 13 plus steady
    work is executed, as in the paper. The same arguments always give the same plan.

    Raises DataError for an empty batch or a length below 1, InfeasiblePlanError where no plan fits
    the memory limit.
    After `settings.deadline_s` nothing more is solved: the best so far is executed or, without one,
    the first that fits greedily; `solver.note` says so.
    Deviation: K is not tried where even without recomputation its proxy could not win.
    """
    started_s = time.perf_counter()
    settings = settings or PlannerSettings()
    batch = _checked(lengths)
    limit_bytes = settings.memory_limit_bytes(cluster)
    cost = CostModel(model, cluster, layout, zero_stage)
    memory = MemoryModel(
        model, layout, zero_stage=zero_stage, loss_block_tokens=settings.loss_block_tokens
    )
    slices = settings.model_copy(update={"mode": "paper"}).slice_limit(layout.pp)
    # what an error says would fit is what is tried last, in lean mode too
    last_resort = settings.model_copy(update={"max_slices": slices})
    question = Question(cost, memory, last_resort)
    check_states(question, limit_bytes, batch)
    deadline = Deadline.of(settings, batch, cost)
    plan: Plan | None = None
    if settings.mode == "lean":
        has_replicas = layout.dp > 1
        sums = GradientSums.of(model, layout, cluster, zero_stage) if has_replicas else None
        choice = search_lean(batch, cost, memory, limit_bytes, settings, deadline, sums)
        if choice is not None:
            plan = assemble_lean(
                choice, batch, cost, cluster, memory, limit_bytes, settings, zero_stage, started_s
            )
        settings = last_resort
    if plan is None:
        source = iterate_chunkings(batch, cost, memory, limit_bytes, settings)
        chunkings: list[Chunking] = []
        found = _search(source, chunkings, deadline)
        if found is None:
            raise infeasible_plan(question, chunkings, batch)
        plan = _assemble(found, batch, model, cluster, zero_stage, started_s)
    verify_plan(plan)
    return plan


@dataclass(frozen=True)
class _Found:
    """The chosen candidate; `status` is the best its solver status may be, `note` says why."""

    candidate: Candidate
    status: str = "optimal"
    note: str = ""


def _search(
    source: Iterator[Chunking], chunkings: list[Chunking], deadline: Deadline
) -> _Found | None:
    """The candidate to execute; `chunkings` receives what was looked at."""
    for chunking in source:
        chunkings.append(chunking)
        if deadline.is_over:
            break
    candidate, num_solved = _cheapest(chunkings, deadline)
    if not deadline.is_over:
        return _finish(candidate, chunkings, deadline)
    late = f"deadline of {deadline.limit_s:.3g} s reached"
    if candidate is not None:
        solved = f"{num_solved} number{'' if num_solved == 1 else 's'} of slices"
        return _Found(candidate, "feasible", f"{late}, the best plan of {solved} is taken")
    candidate = _first_greedy(source, chunkings)
    if candidate is not None:
        return _Found(candidate, "fallback", f"{late} before any plan, a greedy one is taken")
    # an error must be right, however late: greedy may miss what a solver finds
    candidate, _ = _cheapest(chunkings, Deadline())
    return _finish(candidate, chunkings, deadline)


def _finish(
    candidate: Candidate | None, chunkings: Sequence[Chunking], deadline: Deadline
) -> _Found | None:
    note = ""
    if candidate is None:
        note = "no grouping by slice counts fits; sequences of equal slice count were parted"
        candidate = _first_that_fits(chunkings)
    return None if candidate is None else _Found(_polish(candidate, deadline), note=note)


def _checked(lengths: Sequence[int]) -> tuple[int, ...]:
    if len(lengths) == 0:
        raise DataError("the batch is empty: a plan needs at least one sequence")
    for index, length in enumerate(lengths):
        if not isinstance(length, Integral) or length < 1:
            raise DataError(
                f"sequence {index} of the batch has length {length!r}; "
                "lengths must be whole numbers of at least 1 token"
            )
    return tuple(int(length) for length in lengths)


def _cheapest(chunkings: Sequence[Chunking], deadline: Deadline) -> tuple[Candidate | None, int]:
    """The candidate with the smallest proxy, and how many chunkings were solved for it.

    Ties go to the smaller lower bound, then K.
    """
    best: Candidate | None = None
    num_solved = 0
    for chunking in sorted(chunkings, key=lambda c: (c.lower_bound_s, c.k)):
        if best is not None and chunking.lower_bound_s >= best.proxy_s:
            break
        if deadline.is_over:
            break
        below_s = float("inf") if best is None else best.proxy_s
        best = chunking.group(below_s) or best
        num_solved += 1
    return best, num_solved


def _first_greedy(source: Iterator[Chunking], chunkings: list[Chunking]) -> Candidate | None:
    """Uniform recomputation of the first chunking that fits with it, the known ones first."""
    for chunking in sorted(chunkings, key=lambda c: (c.lower_bound_s, c.k)):
        candidate = _with_settings(chunking, solver="greedy").split_apart()
        if candidate is not None:
            return candidate
    for chunking in source:
        chunkings.append(chunking)
        candidate = _with_settings(chunking, solver="greedy").split_apart()
        if candidate is not None:
            return candidate
    return None


def _polish(candidate: Candidate, deadline: Deadline) -> Candidate:
    """The same pipelines solved with what effort the deadline leaves."""
    chunking = candidate.chunking
    if deadline.is_over:
        return candidate
    if deadline.remaining_s < chunking.settings.solver_time_limit_s:
        chunking = _with_settings(chunking, solver_time_limit_s=deadline.remaining_s)
    return chunking.polish(candidate)


def _with_settings(chunking: Chunking, **changes: object) -> Chunking:
    return replace(chunking, settings=chunking.settings.model_copy(update=changes))


def _first_that_fits(chunkings: Sequence[Chunking]) -> Candidate | None:
    apart = (c.split_apart() for c in chunkings)
    return min((c for c in apart if c is not None), key=lambda c: c.proxy_s, default=None)


def _assemble(
    found: _Found,
    lengths: tuple[int, ...],
    model: ModelSpec,
    cluster: ClusterSpec,
    zero_stage: int,
    started_s: float,
) -> Plan:
    candidate = found.candidate
    chunking = candidate.chunking
    layout, settings = chunking.memory.layout, chunking.settings
    pipelines = tuple(solved.plan() for solved in candidate.pipelines)
    operations = pipeline_operations(pipelines, layout.pp)
    streams = lower_plan(pipelines, chunking.chunks, layout, operations)
    predicted = _predict(candidate, streams)
    return Plan(
        model=model,
        cluster=cluster,
        layout=layout,
        lengths=lengths,
        alignment=settings.alignment,
        memory_limit_bytes=chunking.limit_bytes,
        chunks=chunking.chunks,
        pipelines=pipelines,
        streams=streams,
        predicted=predicted,
        solver=_solver_stats(found, time.perf_counter() - started_s),
        zero_stage=zero_stage,
        loss_block_tokens=settings.loss_block_tokens,
    )


def _predict(candidate: Candidate, streams: Sequence[Sequence[Instruction]]) -> Prediction:
    timeline = forecast_streams(streams, candidate.chunking.costs)
    peaks = [
        solved.memory.peaks(solved.solution.counts(solved.memory)) for solved in candidate.pipelines
    ]
    return Prediction(
        timeline.makespan_s,
        timeline.bubble_ratio,
        tuple(int(max(stage)) for stage in zip(*peaks, strict=True)),
    )


def _solver_stats(found: _Found, time_s: float) -> SolverStats:
    candidate = found.candidate
    solutions = [solved.solution for solved in candidate.pipelines]
    total = sum(solution.total for solution in solutions)
    bound = sum(solution.bound for solution in solutions)
    statuses = [found.status, *(solution.status for solution in solutions)]
    status = next((s for s in ("fallback", "feasible") if s in statuses), "optimal")
    return SolverStats(
        mode=candidate.chunking.settings.mode,
        k=candidate.chunking.k,
        status=status,
        gap=(total - bound) / total if total else 0.0,
        time_s=time_s,
        note=found.note,
    )
