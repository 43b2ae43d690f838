"""Which layers to recompute, each stage for itself (D-LP): quick, for streams of any size."""

from __future__ import annotations

import logging
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.predict.ledger import Ledger, StageRows

__all__ = ["round_point", "solve_stages"]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]

_LOGGER = logging.getLogger(__name__)
_LP_UNIT = 2.0**-20  # rows in MiB: HiGHS tolerances are absolute


def solve_stages(ledger: Ledger, rows: tuple[StageRows, ...], recompute_s: FloatArray) -> IntArray:
    """Counts [pp, chunks] of least recompute time on every stage.

    `recompute_s` [chunks] is the time of one layer. An LP per stage over its exact rows, rounded
    and repaired.
    """
    points = [
        _solve_stage(part, ledger.saving, recompute_s, int(layers))
        for part, layers in zip(rows, ledger.layers, strict=True)
    ]
    return round_point(ledger, rows, np.array(points), recompute_s)


def round_point(
    ledger: Ledger,
    rows: tuple[StageRows, ...],
    point: FloatArray,
    recompute_s: FloatArray,
) -> IntArray:
    """Integer counts near `point` [pp, chunks] that keep all rows."""
    from ds_infinipipe.planner.search.lean import kernels

    return np.array(
        [
            kernels.round_counts(
                np.ascontiguousarray(point[stage]),
                part.need,
                part.offsets,
                part.chunks,
                ledger.saving,
                recompute_s,
                int(ledger.layers[stage]),
            )
            for stage, part in enumerate(rows)
        ]
    )


def _solve_stage(
    rows: StageRows, saving: IntArray, recompute_s: FloatArray, layers: int
) -> FloatArray:
    """Least sum of recompute_s * c with every row kept, 0 <= c <= layers; rounding repairs it."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    point = np.zeros(saving.size)
    if rows.need.size == 0:
        return point
    members, column = np.unique(rows.chunks, return_inverse=True)
    matrix = csr_array(
        (-_LP_UNIT * saving[rows.chunks], column, rows.offsets),
        shape=(rows.need.size, members.size),
    )
    result = linprog(
        recompute_s[members] / recompute_s[members].mean(),
        A_ub=matrix,
        b_ub=-_LP_UNIT * rows.need,
        bounds=(0, layers),
        method="highs-ds",
    )
    if result.status == 0:
        point[members] = result.x
    else:
        _LOGGER.info("LP of %d rows not solved: %s", rows.need.size, result.message)
    return point
