"""Sequences to chunks: the slice mesh and Algorithm 1 in the reading that terminates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_infinipipe.errors import ConfigError, DataError
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.time import CostModel

__all__ = ["Thresholds", "chunk_sequences", "slice_mesh", "thresholds"]

_TIME_SLACK = 1 + 1e-9  # a loosened threshold is met by equality: keep rounding from refusing it


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a bucket may hold: T_t in seconds and T_m in tokens (Algorithm 1)."""

    time_s: float
    tokens: int


def slice_mesh(longest: int, k: int, cost: CostModel, unit: int = 1) -> tuple[int, ...]:
    """Ends of at most k slices of `longest` tokens with equal backward work.

    Cut i solves a A(x) + b x = W i / k in closed form, W being the whole sequence's work and A(x)
    x^2 but for sliding windows, and is rounded to the nearest multiple of `unit`; slices that
    vanish by that are left out. The last end is `longest`, whatever the unit.
    """
    a, b = cost.mesh_coefficients
    work = a * cost.area.before(longest) + b * longest
    ends: list[int] = []
    for i in range(1, k):
        cut = cost.area.place(work * i / k, a, b)
        end = unit * math.floor(cut / unit + 0.5)
        if (ends[-1] if ends else 0) < end < longest:
            ends.append(end)
    return (*ends, longest)


def chunk_sequences(
    lengths: Sequence[int],
    k: int,
    cost: CostModel,
    memory: MemoryModel,
    token_limit: int | None = None,
) -> tuple[Chunk, ...]:
    """Algorithm 1: cut the long sequences by the mesh, pack the short ones beside their tails.

    The longest sequence is cut into at most `k` slices. `token_limit` replaces the T_m derived from
    the memory limit of the setup. Slices of a cut sequence end at multiples of the setup's unit and
    each chunk is padded at its end to a multiple of sp. The result has the cut sequences first,
    longest first with their slices in order, then the batched chunks, most tokens first. Raises
    DataError for an empty batch or a length below 1, ConfigError for k < 1.

    Deviation: Algorithm 1 as printed loops for ever, see `_Buckets.place`.
    """
    lengths = [int(length) for length in lengths]
    _check_input(lengths, k)
    sp = memory.layout.sp
    ends = slice_mesh(max(lengths), k, cost, memory.setup.unit)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    long = [i for i in order if lengths[i] > ends[0]]
    short = [i for i in order if lengths[i] <= ends[0]]
    bounds = thresholds([lengths[i] for i in short], ends, cost, memory, token_limit)
    cut = [_cut(i, lengths[i], ends) for i in long]
    buckets = _Buckets(cost, bounds, [slices[-1] for slices in cut], len(short))
    for i in short:
        buckets.place(Slice(i, 0, lengths[i], True))
    chunks: list[Chunk] = []
    for slices, hybrid in zip(cut, buckets.contents, strict=False):
        chunks.extend(_pad((s,), sp) for s in slices[:-1])
        chunks.append(_pad(hybrid, sp))
    batched = [_pad(content, sp) for content in buckets.contents[len(cut) :]]
    chunks.extend(sorted(batched, key=lambda chunk: -chunk.tokens))
    return tuple(chunks)


def thresholds(
    short_lengths: Sequence[int],
    ends: Sequence[int],
    cost: CostModel,
    memory: MemoryModel,
    token_limit: int | None = None,
) -> Thresholds:
    """T_t, the longest slice time of the mesh, and T_m, which the paper leaves out.

    T_m = min(t*, cap(K)), but never below the largest slice: t* tokens of typical short sequences
    take T_t, cap(K) fit into memory. It is a multiple of sp, so padding cannot exceed it.
    """
    starts, area, sp = (0, *ends[:-1]), cost.area.before, memory.layout.sp
    time_s = max(
        cost.total_time(end - start, area(end) - area(start))
        for start, end in zip(starts, ends, strict=True)
    )
    largest = max(end - start for start, end in zip(starts, ends, strict=True))
    if token_limit is None:
        token_limit = memory.token_capacity(len(ends), memory.setup.limit_bytes)
        if short_lengths:
            token_limit = min(token_limit, _typical_tokens(short_lengths, time_s, cost))
    floor_to_sp, ceil_to_sp = token_limit // sp * sp, -(-largest // sp) * sp
    return Thresholds(time_s, max(floor_to_sp, ceil_to_sp))


def _typical_tokens(short_lengths: Sequence[int], time_s: float, cost: CostModel) -> int:
    """t*: most tokens t with T_tot(t, t * sum A(x) / sum x) <= time_s; 0 if none."""
    area_per_token = sum(map(cost.area.before, short_lengths)) / sum(short_lengths)
    high = 1
    while cost.total_time(high, high * area_per_token) <= time_s:
        high *= 2
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if cost.total_time(middle, middle * area_per_token) <= time_s:
            low = middle
        else:
            high = middle - 1
    return low


class _Buckets:
    """Open chunks of Algorithm 1; arrays beside the contents make one pass a few numpy calls."""

    def __init__(
        self, cost: CostModel, bounds: Thresholds, tails: Sequence[Slice], num_short: int
    ) -> None:
        self.contents = [[tail] for tail in tails]
        self._cost = cost
        self._time_s = bounds.time_s
        self._max_tokens = bounds.tokens
        spare = [0] * num_short
        self._tokens = np.array([t.length for t in tails] + spare, dtype=np.float64)
        area = cost.area.before
        self._areas = np.array(
            [area(t.end) - area(t.start) for t in tails] + spare, dtype=np.float64
        )
        self._density = np.full(len(self._tokens), np.inf)
        num_tails = len(tails)
        times = cost.total_times(self._tokens[:num_tails], self._areas[:num_tails])
        self._density[:num_tails] = times / self._tokens[:num_tails]

    def place(self, piece: Slice) -> None:
        """Put a whole sequence where time per token is least among the buckets it fits (l. 7-15).

        A new bucket is opened only when the emptiest one lacks tokens (l. 9-10). When none fits
        both thresholds, T_t is raised to the least time with which one does (l. 14).
        Deviation: line 14 minimises over all buckets, also those without room for the tokens; it
        then sets T_t to the same value for ever. Line 9 has no bucket to look at in the beginning.
        """
        size, length = len(self.contents), piece.length
        tokens = self._tokens[:size] + length
        has_room = tokens <= self._max_tokens
        if not has_room.any():
            self.contents.append([])
            self._add(size, piece)
            return
        times = self._cost.total_times(tokens, self._areas[:size] + self._cost.area.before(length))
        fits = has_room & (times <= self._time_s * _TIME_SLACK)
        if not fits.any():
            self._time_s = float(times[has_room].min())
            fits = has_room & (times <= self._time_s * _TIME_SLACK)
        density = np.where(fits, self._density[:size], np.inf)
        self._add(int(density.argmin()), piece)

    def _add(self, bucket: int, piece: Slice) -> None:
        self.contents[bucket].append(piece)
        self._tokens[bucket] += piece.length
        self._areas[bucket] += self._cost.area.before(piece.length)
        time_s = self._cost.total_time(self._tokens[bucket], self._areas[bucket])
        self._density[bucket] = time_s / self._tokens[bucket]


def _cut(sequence: int, length: int, ends: Sequence[int]) -> tuple[Slice, ...]:
    """Slices of a sequence longer than the first end; the last one is the tail, of any length."""
    own_ends = [*(end for end in ends if end < length), length]
    starts = [0, *own_ends[:-1]]
    return tuple(
        Slice(sequence, start, end - start, end == length)
        for start, end in zip(starts, own_ends, strict=True)
    )


def _pad(slices: Sequence[Slice], sp: int) -> Chunk:
    return Chunk(tuple(slices), -sum(s.length for s in slices) % sp)


def _check_input(lengths: Sequence[int], k: int) -> None:
    if not lengths:
        raise DataError("the batch has no sequences: give at least one length")
    shortest = min(range(len(lengths)), key=lambda i: lengths[i])
    if lengths[shortest] < 1:
        raise DataError(
            f"sequence {shortest} has length {lengths[shortest]}: leave out empty sequences"
        )
    if k < 1:
        raise ConfigError(f"the number of slices is {k}; it must be at least 1")
