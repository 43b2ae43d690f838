"""Which sequences share a pipeline: dynamic programming over slice counts (Eq. 12-14)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ds_infinipipe.planner.plan.chunks import Chunk

__all__ = ["Partition", "partition_classes", "slice_classes"]

Partition = tuple[tuple[int, int], ...]
"""Half-open ranges of classes, one per pipeline, ascending."""


def slice_classes(chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], ...]:
    """Chunk ids by the number of slices of their sequence, ascending; batched chunks count one.

    Eq. 14's S[i], empty classes left out. A hybrid chunk goes with its cut sequence.
    """
    counts: dict[int, int] = {}
    for chunk in chunks:
        if chunk.keeps_kv:
            sequence = chunk.slices[0].sequence
            counts[sequence] = counts.get(sequence, 0) + 1
    classes: dict[int, list[int]] = {}
    for index, chunk in enumerate(chunks):
        slices = counts[chunk.slices[0].sequence] if chunk.keeps_kv else 1
        classes.setdefault(slices, []).append(index)
    return tuple(tuple(classes[slices]) for slices in sorted(classes))


def partition_classes(
    num_classes: int,
    overhead_s: float,
    recompute_s: Callable[[int, int, float], float | None],
    cutoff_s: float = math.inf,
) -> tuple[float, Partition] | None:
    """Cheapest split of the classes into runs, each run a pipeline (Eq. 14).

    A run costs `overhead_s` (delta) and `recompute_s(first, end, limit)` (T_ckpt), which may answer
    None when the run does not fit or cannot be below `limit`. None when no split fits or none is
    below `cutoff_s`. Wider runs are tried first and win ties.
    """
    best = [0.0] + [math.inf] * num_classes
    start = [0] * (num_classes + 1)
    for end in range(1, num_classes + 1):
        pending = overhead_s if end < num_classes else 0.0
        best[end] = cutoff_s - pending
        found = False
        for first in range(end):
            if math.isinf(best[first]):
                continue
            limit = best[end] - best[first] - overhead_s
            if limit <= 0:
                continue
            cost_s = recompute_s(first, end, limit)
            if cost_s is not None and cost_s < limit:
                best[end], start[end], found = best[first] + overhead_s + cost_s, first, True
        if not found:
            best[end] = math.inf
    if math.isinf(best[num_classes]):
        return None
    return best[num_classes], _runs(start, num_classes)


def _runs(start: Sequence[int], end: int) -> Partition:
    runs: list[tuple[int, int]] = []
    while end > 0:
        runs.append((start[end], end))
        end = start[end]
    return tuple(reversed(runs))
