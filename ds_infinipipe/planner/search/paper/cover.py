"""Integer cover problems and their quick solution: LP, rounding, repair, reduction."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.predict.rows import IntArray, MemoryRows

__all__ = ["CoverProblem", "cover_problem", "relax", "round_relaxation"]

_LOGGER = logging.getLogger(__name__)
_ROUND_SLACK = 1e-6
_LP_UNIT = 2.0**-20  # rows in MiB: HiGHS tolerances are absolute


@dataclass(frozen=True)
class CoverProblem:
    """Minimise sum x, 0 <= x <= upper, every row's sum of coefficient * x at least its need.

    Coordinate form like MemoryRows; `variable` says which C each column is a part of. A variable
    has one column per step between the sizes of the stages that meet it, and one for a last layer
    that saves less, so that its count on a stage, min(C, layers), is the sum of the stage's
    columns. Lower steps save at least as much in every row, so an optimum takes them first.
    Coefficients and needs are bytes; `layer_bytes` is the least that a layer saves.
    """

    row: IntArray
    column: IntArray
    coefficient: IntArray
    need: IntArray
    upper: IntArray
    variable: IntArray
    layer_bytes: int

    @cached_property
    def column_start(self) -> IntArray:
        """Entries of column j are `by_column[column_start[j]:column_start[j + 1]]`."""
        counts = np.bincount(self.column, minlength=self.upper.size)
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def row_start(self) -> IntArray:
        """Entries of row i are `row_start[i]:row_start[i + 1]`; rows come sorted."""
        counts = np.bincount(self.row, minlength=self.need.size)
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def by_column(self) -> IntArray:
        return np.argsort(self.column, kind="stable")

    def gather(self, x: IntArray, num_variables: int) -> IntArray:
        """C of Eq. 15 from the columns."""
        return np.bincount(self.variable, weights=x, minlength=num_variables).astype(np.int64)


def cover_problem(rows: MemoryRows, stage_layers: tuple[int, ...]) -> CoverProblem:
    """Columns for the variables that occur in rows; the others are zero in every optimum."""
    layers = np.array(stage_layers)[rows.stage[rows.row]]
    ends = [layers, layers[rows.last < rows.coefficient] - 1]
    levels = np.setdiff1d(np.concatenate(ends), [0])
    entry, step = np.nonzero(layers[:, None] >= levels[None, :])
    is_last = layers[entry] == levels[step]
    coefficient = np.where(is_last, rows.last[entry], rows.coefficient[entry])
    entry, step = entry[coefficient > 0], step[coefficient > 0]
    keys, column = np.unique(rows.variable[entry] * levels.size + step, return_inverse=True)
    order = np.lexsort((column, rows.row[entry]))
    return CoverProblem(
        rows.row[entry][order],
        column[order],
        coefficient[coefficient > 0][order],
        rows.need,
        np.diff(levels, prepend=0)[keys % levels.size],
        keys // levels.size,
        int(rows.coefficient.min()),
    )


def relax(problem: CoverProblem) -> tuple[NDArray[np.float64], int] | None:
    """LP relaxation: its point and the integer lower bound it proves; None if HiGHS gives up."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    matrix = csr_array(
        (-_LP_UNIT * problem.coefficient, problem.column, problem.row_start),
        shape=(problem.need.size, problem.upper.size),
    )
    result = linprog(
        np.ones(problem.upper.size),
        A_ub=matrix,
        b_ub=-_LP_UNIT * problem.need,
        bounds=np.stack([np.zeros(problem.upper.size), problem.upper], axis=1),
        method="highs-ds",
    )
    if result.status != 0:
        _LOGGER.info("LP of %d rows not solved: %s", problem.need.size, result.message)
        return None
    return np.asarray(result.x), math.ceil(result.fun - _ROUND_SLACK)


def round_relaxation(problem: CoverProblem, point: NDArray[np.float64]) -> IntArray:
    """Integers near the LP's point that hold every row; always found when x = upper holds them.

    From each start, raise what rows still lack, then lower what they do not need, in two orders.
    """
    starts = (np.ceil(point - _ROUND_SLACK), np.floor(point + 0.5))
    ascending = range(problem.upper.size)
    best: IntArray | None = None
    for start, descending in product(starts, (False, True)):
        x = np.clip(start.astype(np.int64), 0, problem.upper)
        slack = _slack(problem, x)
        _repair(problem, x, slack)
        _reduce(problem, x, slack, ascending[::-1] if descending else ascending)
        if best is None or x.sum() < best.sum():
            best = x
    assert best is not None
    return best


def _slack(problem: CoverProblem, x: IntArray) -> IntArray:
    covered = np.zeros(problem.need.size, dtype=np.int64)
    np.add.at(covered, problem.row, problem.coefficient * x[problem.column])
    return covered - problem.need


def _repair(problem: CoverProblem, x: IntArray, slack: IntArray) -> None:
    """Fill short rows by their largest coefficients, rows of early columns first (in place)."""
    last = np.maximum.reduceat(problem.column, problem.row_start[:-1])
    for row in np.argsort(last, kind="stable"):
        if slack[row] >= 0:
            continue
        entries = slice(problem.row_start[row], problem.row_start[row + 1])
        columns, weights = problem.column[entries], problem.coefficient[entries]
        for at in np.lexsort((-columns, -weights)):
            column = columns[at]
            wanted = -(-int(-slack[row]) // int(weights[at]))
            raised = min(wanted, int(problem.upper[column] - x[column]))
            if raised > 0:
                _shift(problem, x, slack, column, raised)
            if slack[row] >= 0:
                break


def _reduce(problem: CoverProblem, x: IntArray, slack: IntArray, order: range) -> None:
    """Lower each column as far as its rows allow (in place)."""
    for column in order:
        if x[column] == 0:
            continue
        entries = problem.by_column[problem.column_start[column] : problem.column_start[column + 1]]
        spare = int((slack[problem.row[entries]] // problem.coefficient[entries]).min())
        if spare > 0:
            _shift(problem, x, slack, column, -min(spare, int(x[column])))


def _shift(problem: CoverProblem, x: IntArray, slack: IntArray, column: int, change: int) -> None:
    entries = problem.by_column[problem.column_start[column] : problem.column_start[column + 1]]
    x[column] += change
    slack[problem.row[entries]] += change * problem.coefficient[entries]
