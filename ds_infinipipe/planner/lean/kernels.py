"""Compiled inner loops of lean mode: cutting, packing, and rounding of recompute counts.

`rates` is `PackingRates.as_array()`, see packing.py. Tokens and bytes are int64, times float64
seconds.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.kernels import _compiled

__all__ = ["cut_sequences", "pack_shorts", "round_counts"]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]


@_compiled("float64(float64[::1], int64, int64)")
def _chunk_time(rates: FloatArray, tokens: int, area: int) -> float:
    """Forward and backward of a chunk on the stage that `rates` describe."""
    linear, forward, backward, per_token, fixed_forward, fixed_backward, gather, overlap = rates[:8]
    layers, latency, logits = rates[8:11]
    first = linear * tokens + forward * area + fixed_forward
    second = 2.0 * linear * tokens + backward * area + fixed_backward
    exposed = 3.0 * gather - overlap * (min(first, gather) + min(second, 2.0 * gather))
    layer = first + second + exposed + 2.0 * (per_token * tokens + latency)
    return float(layers * layer + logits * tokens)


@_compiled("(int64[::1], float64[::1], float64, int64, int64, int64, float64, float64)")
def cut_sequences(
    lengths: IntArray,
    times: FloatArray,
    target_s: float,
    max_tokens: int,
    max_slices: int,
    unit: int,
    quadratic: float,
    linear: float,
) -> tuple[IntArray, IntArray]:
    """Slice ends of every sequence, and offsets [n + 1] of each one's ends among them.

    One end, the length, for sequences that stay whole. Balances quadratic x^2 + linear x, as
    `slice_mesh` does, with as many slices as `target_s` and `max_tokens` ask for.
    """
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    ends = np.empty(lengths.size * 2 + max_slices, dtype=np.int64)
    used = 0
    for index in range(lengths.size):
        length = lengths[index]
        slices = 1
        if times[index] > 1.05 * target_s or length > max_tokens:
            slices = max(2, math.ceil(times[index] / target_s - 0.05))
        most = max(1, min(max_slices, -(-length // unit)))
        slices = min(slices, most)
        if used + most > ends.size:
            larger = np.empty(2 * ends.size + most, dtype=np.int64)
            larger[:used] = ends[:used]
            ends = larger
        work = quadratic * length * length + linear * length
        while True:
            count, largest, last = 0, 0, 0
            for cut in range(1, slices):
                share = work * cut / slices
                place = 2.0 * share / (linear + math.sqrt(linear**2 + 4.0 * quadratic * share))
                end = unit * math.floor(place / unit + 0.5)
                if last < end < length:
                    ends[used + count] = end
                    largest = max(largest, end - last)
                    last = end
                    count += 1
            ends[used + count] = length
            largest = max(largest, length - last)
            if largest <= max_tokens or slices >= most or slices == 1:
                break
            slices += 1
        used += count + 1
        offsets[index + 1] = used
    return ends[:used].copy(), offsets


@_compiled("void(float64[::1], int64[::1], int64)")
def _sift_down(keys: FloatArray, heap: IntArray, size: int) -> None:
    """Restore a heap of bins by (key, bin) after its first entry changed."""
    item, at = heap[0], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        right = child + 1
        if right < size:
            a, b = heap[child], heap[right]
            if keys[b] < keys[a] or (keys[b] == keys[a] and b < a):
                child = right
        other = heap[child]
        if keys[item] < keys[other] or (keys[item] == keys[other] and item < other):
            break
        heap[at] = other
        at = child
    heap[at] = item


@_compiled("void(float64[::1], int64[::1], int64)")
def _sift_up(keys: FloatArray, heap: IntArray, at: int) -> None:
    """Restore a heap of bins by (key, bin) after an entry was added at `at`."""
    item = heap[at]
    while at > 0:
        parent = (at - 1) // 2
        other = heap[parent]
        if keys[other] < keys[item] or (keys[other] == keys[item] and other < item):
            break
        heap[at] = other
        at = parent
    heap[at] = item


@_compiled("(int64[::1], int64[::1], int64[::1], float64[::1], int64, float64[::1])")
def pack_shorts(
    lengths: IntArray,
    bin_tokens: IntArray,
    bin_areas: IntArray,
    handicaps: FloatArray,
    max_tokens: int,
    rates: FloatArray,
) -> tuple[IntArray, IntArray, IntArray]:
    """Longest first into the bin with the least time plus handicap that has room (LPT).

    `lengths` descend. Bins come with the slices they hold, or empty. Where no bin has room, a new
    one is opened. Returns the bin of every sequence, and tokens and areas of all bins.
    """
    start = bin_tokens.size
    most = start + lengths.size
    tokens, areas = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64)
    tokens[:start], areas[:start] = bin_tokens, bin_areas
    keys, heap = np.zeros(most), np.empty(most, dtype=np.int64)
    full, room = np.empty(most, dtype=np.int64), np.zeros(most)  # bins set aside, most room first
    chosen = np.empty(lengths.size, dtype=np.int64)
    num_bins, size, num_full = start, 0, 0
    for index in range(start):
        keys[index] = handicaps[index]
        if tokens[index]:
            keys[index] += _chunk_time(rates, tokens[index], areas[index])
        heap[size] = index
        _sift_up(keys, heap, size)
        size += 1
    for at in range(lengths.size):
        length = lengths[at]
        while num_full and -room[full[0]] >= length:
            heap[size] = full[0]
            _sift_up(keys, heap, size)
            size += 1
            num_full -= 1
            full[0] = full[num_full]
            _sift_down(room, full, num_full)
        while size and tokens[heap[0]] > 0 and tokens[heap[0]] + length > max_tokens:
            room[heap[0]] = float(tokens[heap[0]] - max_tokens)
            full[num_full] = heap[0]
            _sift_up(room, full, num_full)
            num_full += 1
            size -= 1
            heap[0] = heap[size]
            _sift_down(keys, heap, size)
        if size == 0:
            heap[0] = num_bins
            num_bins += 1
            size = 1
        best = heap[0]
        chosen[at] = best
        handicap = handicaps[best] if best < start else 0.0
        tokens[best] += length
        areas[best] += length * length
        keys[best] = _chunk_time(rates, tokens[best], areas[best]) + handicap
        _sift_down(keys, heap, size)
    return chosen, tokens[:num_bins].copy(), areas[:num_bins].copy()


@_compiled("(float64[::1], int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], int64)")
def round_counts(
    point: FloatArray,
    need: IntArray,
    offsets: IntArray,
    chunks: IntArray,
    saving: IntArray,
    cost_s: FloatArray,
    most: int,
) -> IntArray:
    """Integers in [0, most] near `point` that keep every row of a stage (rows as StageRows).

    Rounds down, raises what short rows lack by decreasing fraction, then by most bytes a second,
    and lowers what no row needs, most expensive first. Rows that ask too much stay short.
    """
    counts = np.minimum(most, np.floor(point + 1e-6)).astype(np.int64)
    fraction = point - counts
    num_rows = need.size
    slack = np.empty(num_rows, dtype=np.int64)
    for row in range(num_rows):
        slack[row] = -need[row]
        for entry in range(offsets[row], offsets[row + 1]):
            slack[row] += saving[chunks[entry]] * counts[chunks[entry]]
    first = np.full(point.size, num_rows, dtype=np.int64)
    last = np.full(point.size, -1, dtype=np.int64)
    for row in range(num_rows):
        for entry in range(offsets[row], offsets[row + 1]):
            first[chunks[entry]] = min(first[chunks[entry]], row)
            last[chunks[entry]] = row
    for row in range(num_rows):
        while slack[row] < 0:
            best, score = -1, -1.0
            for entry in range(offsets[row], offsets[row + 1]):
                chunk = chunks[entry]
                if counts[chunk] >= most or saving[chunk] <= 0:
                    continue
                # fractions decide first; a whole number less than that only orders the rest
                value = max(0.0, fraction[chunk])
                value = 1.0 + value if value > 1e-6 else 1e-9 * saving[chunk] / cost_s[chunk]
                value = value if value > 1.0 else min(value, 0.999)
                if value > score or (value == score and last[chunk] > last[best]):
                    best, score = chunk, value
            if best < 0:
                break
            counts[best] += 1
            fraction[best] -= 1.0
            # chunks live in consecutive rows: from their F to their B
            slack[first[best] : last[best] + 1] += saving[best]
    order = np.argsort(-cost_s, kind="mergesort")
    for chunk in order:
        if counts[chunk] == 0:
            continue
        if last[chunk] < 0:
            counts[chunk] = 0
            continue
        spare = slack[first[chunk] : last[chunk] + 1].min() // saving[chunk]
        lowered = min(max(spare, 0), counts[chunk])
        counts[chunk] -= lowered
        slack[first[chunk] : last[chunk] + 1] -= lowered * saving[chunk]
    return counts
