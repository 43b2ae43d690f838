"""Compiled inner loops of lean mode: cutting, packing, and rounding of recompute counts.

`rates` is `PackingRates.as_array()`, see packing.py. Tokens and bytes are int64, times float64
seconds.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.predict.kernels import compiled

__all__ = ["cut_sequences", "pack_shorts", "round_counts"]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]


@compiled("float64(float64[::1], int64, int64)")
def _chunk_time(rates: FloatArray, tokens: int, area: int) -> float:
    """Forward and backward of a chunk on the stage that `rates` describe."""
    linear, forward, backward, per_token, fixed_forward, fixed_backward, gather, overlap = rates[:8]
    layers, latency, logits = rates[8:11]
    first = linear * tokens + forward * area + fixed_forward
    second = 2.0 * linear * tokens + backward * area + fixed_backward
    exposed = 3.0 * gather - overlap * (min(first, gather) + min(second, 2.0 * gather))
    layer = first + second + exposed + 2.0 * (per_token * tokens + latency)
    return float(layers * layer + logits * tokens)


@compiled(
    "(int64[::1], float64[::1], float64, int64, int64, int64, float64, float64, int64, float64,"
    "int64[::1])"
)
def cut_sequences(
    lengths: IntArray,
    times: FloatArray,
    target_s: float,
    max_tokens: int,
    max_slices: int,
    unit: int,
    quadratic: float,
    linear: float,
    window: int,
    window_share: float,
    areas: IntArray,
) -> tuple[IntArray, IntArray]:
    """Slice ends of every sequence, and offsets [n + 1] of each one's ends among them.

    One end, the length, for sequences that stay whole. Balances quadratic A(x) + linear x, as
    `slice_mesh` does, with as many slices as `target_s` and `max_tokens` ask for; `areas` are A of
    the lengths, and AttentionArea.place says what a window changes.
    """
    edge = (quadratic * window + linear) * window if window > 0 else np.inf
    far_linear = linear + 2.0 * quadratic * window_share * window
    far_quadratic = quadratic * (1.0 - window_share)
    added = quadratic * window_share * window * window
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
        work = quadratic * areas[index] + linear * length
        while True:
            count, largest, last = 0, 0, 0
            for cut in range(1, slices):
                share = work * cut / slices
                slope, curve = linear, quadratic
                if share > edge:
                    share, slope, curve = share + added, far_linear, far_quadratic
                place = 2.0 * share / (slope + math.sqrt(slope**2 + 4.0 * curve * share))
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


@compiled("void(float64[::1], int64[::1], int64)")
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


@compiled("void(float64[::1], int64[::1], int64)")
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


@compiled("int64(float64[::1], int64[::1], int64, int64)")
def _push(keys: FloatArray, heap: IntArray, size: int, item: int) -> int:
    """Add a bin; returns the new size."""
    heap[size] = item
    _sift_up(keys, heap, size)
    return size + 1


@compiled("int64(float64[::1], int64[::1], int64)")
def _drop_first(keys: FloatArray, heap: IntArray, size: int) -> int:
    """Remove the first bin; returns the new size."""
    heap[0] = heap[size - 1]
    if size > 1:
        _sift_down(keys, heap, size - 1)
    return size - 1


@compiled("(int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], int64, float64[::1])")
def pack_shorts(
    lengths: IntArray,
    own_areas: IntArray,
    bin_tokens: IntArray,
    bin_areas: IntArray,
    handicaps: FloatArray,
    max_tokens: int,
    rates: FloatArray,
) -> tuple[IntArray, IntArray, IntArray]:
    """Longest first into the bin with the least time plus handicap that has room (LPT).

    `lengths` descend, `own_areas` are theirs. Bins come with the slices they hold, or empty. Where
    no bin has room, a new one is opened. Returns the bin of every sequence, and tokens and areas of
    all bins.
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
        size = _push(keys, heap, size, index)
    for at in range(lengths.size):
        length = lengths[at]
        while num_full and -room[full[0]] >= length:
            size = _push(keys, heap, size, full[0])
            num_full = _drop_first(room, full, num_full)
        while size and tokens[heap[0]] > 0 and tokens[heap[0]] + length > max_tokens:
            room[heap[0]] = float(tokens[heap[0]] - max_tokens)
            num_full = _push(room, full, num_full, heap[0])
            size = _drop_first(keys, heap, size)
        if size == 0:
            heap[0] = num_bins
            num_bins += 1
            size = 1
        best = heap[0]
        chosen[at] = best
        handicap = handicaps[best] if best < start else 0.0
        tokens[best] += length
        areas[best] += own_areas[at]
        keys[best] = _chunk_time(rates, tokens[best], areas[best]) + handicap
        _sift_down(keys, heap, size)
    return chosen, tokens[:num_bins].copy(), areas[:num_bins].copy()


@compiled("(int64[::1], int64[::1], int64[::1])")
def _row_spans(offsets: IntArray, chunks: IntArray, saving: IntArray) -> tuple[IntArray, IntArray]:
    """First row of every chunk and the one after its last: it lives from its F to its B."""
    num_rows = offsets.size - 1
    first = np.full(saving.size, num_rows, dtype=np.int64)
    end = np.zeros(saving.size, dtype=np.int64)
    for row in range(num_rows):
        for entry in range(offsets[row], offsets[row + 1]):
            first[chunks[entry]] = min(first[chunks[entry]], row)
            end[chunks[entry]] = row + 1
    return first, end


@compiled(
    "int64(int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], float64[::1], int64)"
)
def _best_to_raise(
    members: IntArray,
    counts: IntArray,
    end: IntArray,
    saving: IntArray,
    fraction: FloatArray,
    cost_s: FloatArray,
    most: int,
) -> int:
    """By largest fraction left, then most bytes a second; of equals the longest alive; -1: none."""
    best, is_whole, score = -1, True, -1.0
    for chunk in members:
        if counts[chunk] >= most or saving[chunk] <= 0:
            continue
        whole = fraction[chunk] <= 1e-6
        value = saving[chunk] / cost_s[chunk] if whole else fraction[chunk]
        if whole and not is_whole:
            continue
        is_better = value > score or (value == score and end[chunk] > end[best])
        if best < 0 or (is_whole and not whole) or is_better:
            best, is_whole, score = chunk, whole, value
    return best


@compiled("(float64[::1], int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], int64)")
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

    Rounds down, raises what short rows lack, and lowers what no row needs, most expensive first.
    Rows that ask too much stay short.
    """
    counts = np.minimum(most, np.floor(point + 1e-6)).astype(np.int64)
    fraction = point - counts
    first, end = _row_spans(offsets, chunks, saving)
    slack = -need
    for chunk in range(point.size):
        if counts[chunk]:
            slack[first[chunk] : end[chunk]] += saving[chunk] * counts[chunk]
    for row in range(need.size):
        while slack[row] < 0:
            members = chunks[offsets[row] : offsets[row + 1]]
            best = _best_to_raise(members, counts, end, saving, fraction, cost_s, most)
            if best < 0:
                break
            counts[best] += 1
            fraction[best] -= 1.0
            slack[first[best] : end[best]] += saving[best]
    for chunk in np.argsort(-cost_s, kind="mergesort"):
        if counts[chunk] == 0:
            continue
        lowered = counts[chunk]
        if first[chunk] < end[chunk]:
            spare = slack[first[chunk] : end[chunk]].min() // saving[chunk]
            lowered = min(max(spare, 0), lowered)
            slack[first[chunk] : end[chunk]] -= lowered * saving[chunk]
        counts[chunk] -= lowered
    return counts
