"""Each long sequence cut by a mesh of its own, so that no slice is a small rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.costs import CostModel

if TYPE_CHECKING:
    from ds_infinipipe.planner.lean.packing import SortedBatch

__all__ = ["SliceMesh", "cut_batch"]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SliceMesh:
    """Slices of the cut sequences, longest sequence first, slices in order; arrays [slice].

    The first `num_cut` sequences of the sorted batch are cut; `rank` is the place among them,
    `slices` the number of slices of the slice's sequence, `times_s` T_tot of the slice alone.
    """

    num_cut: int
    rank: IntArray
    sequence: IntArray
    start: IntArray
    length: IntArray
    is_tail: NDArray[np.bool_]
    slices: IntArray
    areas: IntArray
    times_s: FloatArray


def cut_batch(
    batch: SortedBatch,
    cost: CostModel,
    target_s: float,
    max_tokens: int,
    max_slices: int,
    unit: int,
) -> SliceMesh:
    """Cut what takes longer than `target_s` or has more than `max_tokens` into balanced slices.

    A sequence of time t gets ceil(t / target_s) slices, at least 2 and at most `max_slices`, more
    while one of them exceeds `max_tokens`. Ends are multiples of `unit`; what is no longer than
    that stays whole.
    """
    from ds_infinipipe.planner.lean import kernels

    is_long = (batch.whole_s > 1.05 * target_s) | (batch.lengths > max_tokens)
    is_long &= (batch.lengths > unit) & (max_slices > 1)
    num_long = int(np.count_nonzero(is_long))  # longer ones take longer: these come first
    ends, offsets = kernels.cut_sequences(
        batch.lengths[:num_long],
        batch.whole_s[:num_long],
        target_s,
        max_tokens,
        max_slices,
        unit,
        *cost.mesh_coefficients,
        cost.area.window,
        cost.area.share,
        cost.area.before(batch.lengths[:num_long]),
    )
    count = np.diff(offsets)
    # rounding to large units can leave one slice
    num_cut = num_long if (count > 1).all() else int(np.argmin(count > 1))
    count, ends = count[:num_cut], ends[: offsets[num_cut]]
    rank = np.repeat(np.arange(num_cut), count)
    start = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    start[offsets[:num_cut]] = 0
    areas = cost.area.before(ends) - cost.area.before(start)
    length = ends - start
    return SliceMesh(
        num_cut=num_cut,
        rank=rank,
        sequence=batch.sequence[rank],
        start=start,
        length=length,
        is_tail=ends == batch.lengths[rank],
        slices=count[rank],
        areas=areas,
        times_s=cost.total_times(length.astype(np.float64), areas.astype(np.float64)),
    )
