"""Lengths of one batch to a verified plan: the one door to the planner."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from ds_infinipipe.errors import DataError, InfeasiblePlanError
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.plan import Plan, Prediction, SolverStats
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.replica_sum import GradientSums, step_time_s
from ds_infinipipe.planner.predict.schedule import (
    pipeline_counts,
    pipeline_schedule,
    simulate_schedule,
)
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.deadline import Deadline
from ds_infinipipe.planner.search.lean.assemble import assemble_lean
from ds_infinipipe.planner.search.lean.search import search_lean
from ds_infinipipe.planner.search.paper.chunkings import Candidate, Chunking, iterate_chunkings
from ds_infinipipe.planner.search.what_if.capacity import Question
from ds_infinipipe.planner.search.what_if.infeasible import check_states, infeasible_plan
from ds_infinipipe.planner.verify.frame import verify_plan

__all__ = ["plan_batch"]

_LEAST_GAIN = 1e-3  # of a step: what another search is worth


def plan_batch(
    lengths: Sequence[int], setup: Setup, settings: PlannerSettings | None = None
) -> Plan:
    """Plan one optimizer step over sequences of `lengths` tokens; verified before it is returned.

    Mode `lean`: see lean/search.py; where no merged stream fits, as in paper
    mode. Mode `paper`: for every K up to the slice limit, chunks by Algorithm 1, pipelines
    by Eq. 14, recomputation by Algorithm 2. The K with the smallest proxy of Eq. 13 plus steady
    work is executed, as in the paper. The same arguments always give the same plan.

    Where gathers for every chunk take time, lean mode also plans with parameters gathered once a
    step, and takes what is faster; `settings.gather` decides instead unless it is "auto". So what
    the setup says of it does not count; the plan's own setup says what was taken.

    Raises DataError for an empty batch or a length below 1, InfeasiblePlanError where no plan fits
    the memory limit.
    After `settings.deadline_s` nothing more is solved: the best so far is executed or, without one,
    the first that fits greedily; `solver.note` says so.
    Deviation: K is not tried where even without recomputation its proxy could not win.
    """
    settings = settings or PlannerSettings()
    batch = _checked(lengths)
    can_keep = setup.gathers_parameters
    planning = _Planning.of(setup, settings, can_keep and settings.gather == "step")
    deadline = Deadline.of(settings, batch, planning.cost)
    plan = planning.plan(batch, deadline)
    if can_keep and settings.gather == "auto" and settings.mode == "lean":
        plan = _Planning.of(setup, settings, True).improve(plan, batch, deadline)
    verify_plan(plan)
    return plan


@dataclass(frozen=True)
class _Planning:
    """What a batch is planned for."""

    setup: Setup
    settings: PlannerSettings
    cost: CostModel
    memory: MemoryModel

    @classmethod
    def of(cls, setup: Setup, settings: PlannerSettings, keeps_gathered: bool) -> _Planning:
        setup = setup.run_with(keeps_gathered=keeps_gathered)
        return cls(setup, settings, CostModel(setup), MemoryModel(setup))

    def plan(self, batch: tuple[int, ...], deadline: Deadline) -> Plan:
        """A plan, not verified; raises InfeasiblePlanError where none fits."""
        started_s = time.perf_counter()
        settings, cost, memory = self.settings, self.cost, self.memory
        slices = settings.model_copy(update={"mode": "paper"}).slice_limit(self.setup.layout.pp)
        # what an error says would fit is what is tried last, in lean mode too
        last_resort = settings.model_copy(update={"max_slices": slices})
        question = Question(self.setup, last_resort)
        check_states(question, batch)
        if settings.mode == "lean":
            choice = search_lean(batch, cost, memory, settings, deadline, self._sums)
            if choice is not None:
                return assemble_lean(choice, batch, cost, memory, settings.mode, started_s)
        chunkings: list[Chunking] = []
        source = iterate_chunkings(batch, cost, memory, last_resort)
        found = _search(source, chunkings, deadline)
        if found is None:
            raise infeasible_plan(question, chunkings, batch)
        return _assemble(found, batch, started_s)

    @property
    def _sums(self) -> GradientSums | None:
        return None if self.setup.layout.dp == 1 else GradientSums.of(self.setup)

    def improve(self, plan: Plan, batch: tuple[int, ...], deadline: Deadline) -> Plan:
        """The plan with gathers for every chunk, or one that keeps them where that is faster."""
        gain_s = self._gain_s(plan)
        if gain_s <= _LEAST_GAIN * plan.predicted.step_time_s or deadline.is_over:
            return plan
        if max(self.memory.static_bytes) >= self.setup.limit_bytes:
            return plan
        try:
            other = self.plan(batch, deadline)
        except InfeasiblePlanError:
            return plan
        took_s = plan.solver.time_s + other.solver.time_s
        best = other if step_time_s([other]) < step_time_s([plan]) else plan
        return replace(best, solver=replace(best.solver, time_s=took_s))

    def _gain_s(self, plan: Plan) -> float:
        """What the chunks of a plan wait for gathers, on the stage that waits longest."""
        costs = [cost.chunk_costs(plan.chunks) for cost in (CostModel(plan.setup), self.cost)]
        work_s = [(c.forward_s + c.backward_s).sum(axis=1) for c in costs]
        return float((work_s[0] - work_s[1]).max())


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


def _assemble(found: _Found, lengths: tuple[int, ...], started_s: float) -> Plan:
    candidate = found.candidate
    chunking = candidate.chunking
    setup, layout = chunking.memory.setup, chunking.memory.layout
    pipelines = tuple(solved.plan() for solved in candidate.pipelines)
    schedule = pipeline_schedule(pipelines, layout.pp)
    counts = pipeline_counts(pipelines, chunking.ledger.shape)
    timeline = simulate_schedule(schedule, chunking.costs, counts).timeline()
    # of all pipelines one after the other; those of each alone are no less
    peaks = tuple(chunking.ledger.peaks(schedule, counts).tolist())
    return Plan(
        setup=setup,
        lengths=lengths,
        chunks=chunking.chunks,
        pipelines=pipelines,
        streams=lower_plan(pipelines, chunking.chunks, layout, schedule.as_operations()),
        predicted=Prediction(timeline.makespan_s, timeline.bubble_ratio, peaks),
        solver=_solver_stats(found, time.perf_counter() - started_s),
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
