"""Which layers to recompute so that the step ends soonest: one LP over start times and counts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.predict.ledger import Ledger, StageRows
from ds_infinipipe.planner.predict.schedule import ScheduleArrays
from ds_infinipipe.planner.predict.time import ChunkCosts
from ds_infinipipe.planner.search.lean.stage_lp import round_point

__all__ = ["solve_makespan"]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]

_LOGGER = logging.getLogger(__name__)
_LP_UNIT = 2.0**-28  # rows in quarters of a GiB, of the size of times in seconds
_TIE = 1e-3  # weight of the recompute time itself: least among equal makespans


def solve_makespan(
    ledger: Ledger,
    rows: tuple[StageRows, ...],
    schedule: ScheduleArrays,
    costs: ChunkCosts,
) -> IntArray | None:
    """Counts [pp, chunks] that keep the rows and nearly minimise the makespan.

    Recomputation goes where stages would idle. The LP has free counts per stage and chunk and the
    start of every operation; counts are then rounded and repaired. None if HiGHS gives up.
    """
    point = _Problem(schedule, costs).solve(ledger, rows)
    return None if point is None else round_point(ledger, rows, point, costs.recompute_s)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Columns: starts of F [pp, n], starts of B [pp, n], counts [pp, n], the makespan."""

    schedule: ScheduleArrays
    costs: ChunkCosts

    @property
    def shape(self) -> tuple[int, int]:
        stages, chunks = self.costs.forward_s.shape
        return int(stages), int(chunks)

    @property
    def num_columns(self) -> int:
        return 3 * self.costs.forward_s.size + 1

    def _start(self, stage: IntArray | int, operation: IntArray) -> IntArray:
        stages, chunks = self.shape
        is_back = operation < 0
        chunk = np.where(is_back, -operation - 1, operation)
        return np.asarray(is_back * stages * chunks + stage * chunks + chunk, dtype=np.int64)

    def solve(self, ledger: Ledger, rows: tuple[StageRows, ...]) -> FloatArray | None:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        stages, chunks = self.shape
        entries, bounds_s = self._precedence()
        memory, needs = _memory_entries(rows, ledger.saving, 2 * stages * chunks, chunks)
        memory[0] += bounds_s.size
        row, column, value = (np.concatenate(pair) for pair in zip(entries, memory, strict=True))
        total = bounds_s.size + needs.size
        matrix = coo_array((value, (row, column)), shape=(total, self.num_columns)).tocsr()
        objective = np.zeros(self.num_columns)
        counts = slice(2 * stages * chunks, 3 * stages * chunks)
        objective[counts] = np.tile(_TIE / stages * self.costs.recompute_s, stages)
        objective[-1] = 1.0
        upper = np.full(self.num_columns, np.inf)
        upper[counts] = self._most_counts(rows, ledger.layers)
        result = linprog(
            objective,
            A_ub=matrix,
            b_ub=np.concatenate([bounds_s, needs]),
            bounds=np.stack([np.zeros(self.num_columns), upper], axis=1),
            method="highs-ds",
        )
        if result.status != 0:
            _LOGGER.info("makespan LP of %d rows not solved: %s", total, result.message)
            return None
        return np.asarray(result.x[counts]).reshape(stages, chunks)

    def _most_counts(self, rows: tuple[StageRows, ...], layers: IntArray) -> FloatArray:
        """0 for chunks in no row: to recompute them saves nothing that is needed."""
        most = np.zeros(self.shape)
        for stage, part in enumerate(rows):
            most[stage, part.chunks] = layers[stage]
        return most.ravel()

    def _precedence(self) -> tuple[list[FloatArray], FloatArray]:
        """Rows start(before) + duration(before) - start(after) <= -delay as entries and bounds."""
        before, after, delay = self._pairs()
        stages, chunks = self.shape
        size = stages * chunks
        row = np.arange(before.size)
        is_back = before >= size
        duration = np.concatenate([self.costs.forward_s.ravel(), self.costs.backward_s.ravel()])
        recompute = np.tile(self.costs.recompute_s, stages)
        entries = [
            np.concatenate([row, row, row[is_back]]),
            np.concatenate([before, after, before[is_back] + size]),
            np.concatenate(
                [
                    np.ones(before.size),
                    -np.ones(before.size),
                    recompute[before[is_back] - size],
                ]
            ),
        ]
        return entries, -(duration[before] + delay)

    def _pairs(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Columns of operations that follow each other, and the transfer between them."""
        operations = self.schedule.operations
        stages, chunks = self.shape
        size, end = stages * chunks, self.num_columns - 1
        stage = np.arange(stages)[:, None]
        columns = self._start(stage, operations)
        sent = np.arange(size - chunks)  # all F but the last stage's; B of those receive
        last = np.arange(size - chunks, size)
        transfer = np.tile(self.costs.p2p_s, stages - 1)
        before = [columns[:, :-1].ravel(), columns[:, -1], last, sent, size + sent + chunks]
        after = [columns[:, 1:].ravel(), np.full(stages, end), size + last, sent + chunks]
        after.append(size + sent)
        none = np.zeros(columns.size + chunks)
        return (
            np.concatenate(before),
            np.concatenate(after),
            np.concatenate([none, transfer, transfer]),
        )


def _memory_entries(
    rows: tuple[StageRows, ...], saving: IntArray, first_count: int, chunks: int
) -> tuple[list[FloatArray], FloatArray]:
    """Rows -saving * count <= -need of all stages."""
    row, column, value, need = [], [], [], []
    done = 0
    for stage, part in enumerate(rows):
        size = np.diff(part.offsets)
        row.append(done + np.repeat(np.arange(part.need.size), size))
        column.append(first_count + stage * chunks + part.chunks)
        value.append(-_LP_UNIT * saving[part.chunks])
        need.append(-_LP_UNIT * part.need)
        done += part.need.size
    return [np.concatenate(row), np.concatenate(column), np.concatenate(value)], np.concatenate(
        need
    )
