"""One merged stream of all chunks under windows that shrink, and how long it takes."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.predict.replica_sum import GradientSums
from ds_infinipipe.planner.predict.schedule import (
    ScheduleArrays,
    load_kernels,
    simulate_schedule,
)
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel
from ds_infinipipe.planner.search.lean.packing import PackedBatch

__all__ = ["build_stream", "simulate_s", "stream_costs", "stream_windows"]

IntArray: TypeAlias = NDArray[np.int64]


def stream_windows(packed: PackedBatch, pp: int, growth: float, extra: int) -> IntArray:
    """Chunks in flight before each backward, [pp, chunks].

    w(p, j) = pp - 1 - p + m(j) + extra, never more than Eq. 7 allows. m(j) is the slices of the
    sequence at position j, or what lets m grow by `growth` a backward until a later one needs it.
    The last stage holds a whole sequence before its tail's backward and no stage less than the
    next one, so nothing deadlocks.
    """
    head_room = np.arange(pp - 1, -1, -1, dtype=np.int64)[:, None]
    slope = growth * np.arange(packed.num_chunks)
    later = np.maximum.accumulate((packed.slices - slope)[::-1])[::-1] + slope
    needed = np.ceil(later - 1e-9).astype(np.int64)
    ahead = [needed]
    for _ in range(pp - 1):  # a stage must have issued what the next one is about to need
        following = np.append(ahead[-1][1:], 0)
        ahead.append(np.maximum(ahead[-1], following))
    windows = head_room + np.array(ahead[::-1]) + extra
    return np.asarray(np.minimum(windows, head_room + packed.slices.max()))


def build_stream(packed: PackedBatch, pp: int, growth: float, extra: int) -> ScheduleArrays:
    """F and B of all stages; blocks run backward in the order they ran forward (Eq. 16)."""
    forward = np.arange(packed.num_chunks, dtype=np.int64)
    backward = _reverse_blocks(packed)
    windows = np.ascontiguousarray(stream_windows(packed, pp, growth, extra))
    operations, stage, position = load_kernels().build_operations(forward, backward, windows)
    if stage >= 0:
        raise ScheduleError(
            f"stage {stage}: a window of {windows[stage, position]} chunks reaches "
            f"B{backward[position]} before its F"
        )
    return ScheduleArrays(operations, forward, backward)


def _reverse_blocks(packed: PackedBatch) -> IntArray:
    """Chunk ids in backward order: slices of a sequence, which follow each other, reversed."""
    at = np.arange(packed.num_chunks, dtype=np.int64)
    first = np.where((packed.sequence < 0) | (packed.start == 0), at, 0)
    first = np.maximum.accumulate(first)
    return 2 * first + packed.slices - 1 - at


def stream_costs(packed: PackedBatch, cost: CostModel) -> ChunkCosts:
    return cost.size_costs(*packed.padded_sizes(cost.layout.sp, cost.area))


def simulate_s(
    schedule: ScheduleArrays,
    costs: ChunkCosts,
    counts: IntArray | None = None,
    sums: GradientSums | None = None,
) -> float:
    """Makespan, with stage p recomputing counts[p, k] layers of chunk k (none).

    With `sums` the end of the replicas' sum of gradients, if this replica were the last.
    """
    simulated = simulate_schedule(schedule, costs, counts)
    return simulated.makespan_s if sums is None else sums.schedule_s(simulated, costs)
