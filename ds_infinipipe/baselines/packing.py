"""Chunks of fixed size and bins of whole sequences: how the baselines form micro-batches."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from ds_infinipipe.planner.plan.chunks import Chunk, Slice

__all__ = ["best_fit", "fixed_chunks", "lightest_bin_first"]


def best_fit(lengths: Sequence[int], capacity: int, used: Sequence[int] = ()) -> list[list[int]]:
    """Best-fit decreasing: each sequence into the bin with the least room that it fits.

    `used` tokens are in the first bins already. A sequence above the capacity gets a bin of its
    own. Returns sequence numbers by bin.
    """
    bins: list[list[int]] = [[] for _ in used]
    room = sorted((capacity - tokens, number) for number, tokens in enumerate(used))
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[sequence], -1))
        if at == len(room):
            number, free = len(bins), capacity
            bins.append([])
        else:
            free, number = room.pop(at)
        bins[number].append(sequence)
        insort(room, (free - lengths[sequence], number))
    return bins


def lightest_bin_first(
    lengths: Sequence[int], weights: Sequence[float], num_bins: int, capacity: int
) -> list[list[int]] | None:
    """Heaviest sequence first, each into the lightest bin with room; None where one has none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    heap = [(0.0, number) for number in range(num_bins)]
    for sequence in sorted(range(len(lengths)), key=lambda i: (-weights[i], i)):
        full: list[tuple[float, int]] = []
        while heap and tokens[heap[0][1]] + lengths[sequence] > capacity:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        weight, number = heapq.heappop(heap)
        bins[number].append(sequence)
        tokens[number] += lengths[sequence]
        for entry in (*full, (weight + weights[sequence], number)):
            heapq.heappush(heap, entry)
    return bins


def fixed_chunks(
    lengths: Sequence[int], size: int, unit: int, sp: int, *, is_even: bool = False
) -> tuple[Chunk, ...]:
    """Chunks of at most `size` tokens: long sequences cut, tails and short ones packed together.

    Cuts are at multiples of `unit`, every `size` tokens, or `is_even` into equal pieces. Tails get
    a chunk each and take short sequences, best-fit; so with a size of the longest sequence or more
    nothing is cut. Ordered like `chunk_sequences`: cut sequences first, then the others.
    """
    size = max(unit, size // unit * unit)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cut = [_cut(i, lengths[i], size, unit, is_even) for i in order if lengths[i] > size]
    short = [i for i in order if lengths[i] <= size]
    bins = best_fit([lengths[i] for i in short], size, [slices[-1].length for slices in cut])
    packed = [[Slice(short[j], 0, lengths[short[j]], True) for j in members] for members in bins]
    chunks: list[Chunk] = []
    for slices, beside in zip(cut, packed, strict=False):
        chunks += [_pad((piece,), sp) for piece in slices[:-1]]
        chunks.append(_pad((slices[-1], *beside), sp))
    whole = [_pad(tuple(members), sp) for members in packed[len(cut) :]]
    chunks += sorted(whole, key=lambda chunk: -chunk.tokens)
    return tuple(chunks)


def _cut(sequence: int, length: int, size: int, unit: int, is_even: bool) -> list[Slice]:
    step = size
    if is_even:
        step = min(size, unit * math.ceil(length / math.ceil(length / size) / unit))
    starts = range(0, length, step)
    return [
        Slice(sequence, start, min(step, length - start), start + step >= length)
        for start in starts
    ]


def _pad(slices: tuple[Slice, ...], sp: int) -> Chunk:
    return Chunk(slices, -sum(s.length for s in slices) % sp)
