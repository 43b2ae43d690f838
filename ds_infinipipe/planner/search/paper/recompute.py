"""How many layers each stage recomputes for each chunk of a pipeline (Algorithm 2, Eq. 15-20).

The only module that imports OR-Tools, and only when a solve needs it: that takes 0.2 s or more.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.predict.rows import IntArray, PipelineMemory, recompute_counts
from ds_infinipipe.planner.search.paper.cover import (
    CoverProblem,
    cover_problem,
    relax,
    round_relaxation,
)

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

__all__ = ["RecomputeSolution", "solve_recompute"]

_LOGGER = logging.getLogger(__name__)
_TRIAL_SLACK_LAYERS = 4
_RESOLUTION = 4096  # solver units per smallest coefficient; finer is slower, coarser costs layers


@dataclass(frozen=True)
class RecomputeSolution:
    """C of one pipeline, what it costs, and how it was found.

    `total` is the objective sum of C (Eq. 20) and `bound` a lower bound of it. `status` is
    "optimal" (within the relative gap, or nothing to choose), "feasible" (a limit fired or a greedy
    choice) or "fallback" (uniform, because the solver gave nothing that fits).
    """

    variables: tuple[int, ...]
    total: int
    bound: int
    status: str

    def counts(self, pipeline: PipelineMemory) -> IntArray:
        """[stage, i] for forward[i], Eq. 16."""
        return recompute_counts(pipeline, np.array(self.variables, dtype=np.int64))


def solve_recompute(
    pipeline: PipelineMemory,
    limit_bytes: int,
    settings: PlannerSettings | None = None,
    cutoff: float = math.inf,
    effort: float = 1.0,
    is_trial: bool = False,
) -> RecomputeSolution | None:
    """Fewest recomputed layers with which every stage stays within the limit (Eq. 20).

    None when nothing fits, or when it is proved that the total cannot be below `cutoff`.
    The answer always passes the exact memory scan. `effort` is the share of the solver's time
    limit; a trial is content with the rounded relaxation within the gap or a few layers.
    """
    settings = settings or PlannerSettings()
    if settings.recompute == "none":
        return _same_everywhere(pipeline, limit_bytes, 0)
    if settings.recompute == "full":
        return _same_everywhere(pipeline, limit_bytes, max(pipeline.layout.stage_layers))
    rows = pipeline.rows(limit_bytes)
    if rows is None:
        return None
    if rows.is_empty:
        return _same_everywhere(pipeline, limit_bytes, 0)
    if settings.solver == "greedy":
        return _uniform(pipeline, limit_bytes, "feasible")
    problem = cover_problem(rows, pipeline.layout.stage_layers)
    relaxed = relax(problem)
    point, bound = relaxed or (np.zeros(problem.upper.size), 0)
    if bound >= cutoff:
        return None
    rounded = round_relaxation(problem, point)
    if is_trial and _is_close(int(rounded.sum()), bound, settings):
        solution = _solution(problem, rounded, bound, pipeline, settings, is_closed=False)
    else:
        solution = _solve_cover(problem, rounded, bound, pipeline, settings, effort)
    if (pipeline.peaks(solution.counts(pipeline)) <= limit_bytes).all():
        return solution
    _LOGGER.warning("the solved recomputation exceeds the limit in the exact scan; using uniform")
    return _uniform(pipeline, limit_bytes, "fallback")


def _same_everywhere(
    pipeline: PipelineMemory, limit_bytes: int, layers: int
) -> RecomputeSolution | None:
    """The only choice: `layers` for every chunk, clipped on smaller stages; None if too large."""
    variables = (layers,) * pipeline.num_variables
    total = layers * pipeline.num_variables
    solution = RecomputeSolution(variables, total, total, "optimal")
    fits = pipeline.peaks(solution.counts(pipeline)) <= limit_bytes
    return solution if fits.all() else None


def _uniform(pipeline: PipelineMemory, limit_bytes: int, status: str) -> RecomputeSolution | None:
    """Smallest equal count that fits, else full recomputation, else None."""
    layers = pipeline.uniform_count(limit_bytes)
    chosen = max(pipeline.layout.stage_layers) if layers is None else layers
    solution = _same_everywhere(pipeline, limit_bytes, chosen)
    return None if solution is None else replace(solution, bound=0, status=status)


def _is_close(total: int, bound: int, settings: PlannerSettings) -> bool:
    """Few layers of a small total are a large gap that is slow to close and worth little."""
    return total - bound <= max(settings.relative_gap * total, _TRIAL_SLACK_LAYERS)


def _solve_cover(
    problem: CoverProblem,
    rounded: IntArray,
    bound: int,
    pipeline: PipelineMemory,
    settings: PlannerSettings,
    effort: float,
) -> RecomputeSolution:
    """CP-SAT from the rounded relaxation as hint; the better of the two is the answer."""
    if rounded.sum() <= bound:
        return _solution(problem, rounded, bound, pipeline, settings, is_closed=True)
    solved, solved_bound, is_closed = _cp_sat(problem, rounded, settings, effort)
    best = rounded if solved is None or solved.sum() >= rounded.sum() else solved
    return _solution(problem, best, max(bound, solved_bound), pipeline, settings, is_closed)


def _solution(
    problem: CoverProblem,
    columns: IntArray,
    bound: int,
    pipeline: PipelineMemory,
    settings: PlannerSettings,
    is_closed: bool,
) -> RecomputeSolution:
    total = int(columns.sum())
    is_closed = is_closed or total - bound <= settings.relative_gap * total
    variables = problem.gather(columns, pipeline.num_variables)
    return RecomputeSolution(
        tuple(int(c) for c in variables),
        total,
        min(bound, total),
        "optimal" if is_closed else "feasible",
    )


def _cp_sat(
    problem: CoverProblem, hint: IntArray, settings: PlannerSettings, effort: float
) -> tuple[IntArray | None, int, bool]:
    """Columns or None, a lower bound, and whether the relative gap was reached.

    Savings are floored and needs rounded up to solver units, so an answer holds in bytes too; where
    that leaves none, bytes are the unit. The limit is CP-SAT's deterministic time, about seconds of
    one core, so the same rows always give the same answer.
    """
    from ortools.sat.python import cp_model

    unit = max(1, problem.layer_bytes // _RESOLUTION)
    model, columns = _cp_model(problem, hint, unit)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.relative_gap_limit = settings.relative_gap
    solver.parameters.random_seed = settings.seed
    solver.parameters.max_deterministic_time = effort * settings.solver_time_limit_s
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE and unit > 1:
        model, columns = _cp_model(problem, hint, 1)
        status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        _LOGGER.info("CP-SAT ended as %s on %d rows", solver.status_name(status), problem.need.size)
        return None, 0, False
    values = np.array([solver.value(column) for column in columns], dtype=np.int64)
    bound = math.ceil(solver.best_objective_bound - 1e-6)
    return values, bound, status == cp_model.OPTIMAL


def _cp_model(
    problem: CoverProblem, hint: IntArray, unit: int
) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """The problem in units of `unit` bytes."""
    from ortools.sat.python import cp_model

    savings = (problem.coefficient // unit).tolist()
    needs = (-(-problem.need // unit)).tolist()
    model = cp_model.CpModel()
    columns = [model.new_int_var(0, int(upper), "") for upper in problem.upper]
    entries = problem.column.tolist()
    starts = problem.row_start.tolist()
    for need, first, last in zip(needs, starts, starts[1:], strict=False):
        saved = cp_model.LinearExpr.weighted_sum(
            [columns[j] for j in entries[first:last]], savings[first:last]
        )
        model.add(saved >= need)
    for column, value in zip(columns, hint.tolist(), strict=True):
        model.add_hint(column, value)
    model.minimize(cp_model.LinearExpr.sum(columns))
    return model, columns
