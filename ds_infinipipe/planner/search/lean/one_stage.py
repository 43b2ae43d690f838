"""One stage (pp = 1): whole sequences in as few chunks as memory holds without recomputation.

A single stage has no bubbles, so what a plan can save are fixed costs per chunk and recomputation,
and with replicas what of the gradients' sum outlasts the last backward, which is therefore the
longest. A cut would save nothing: all slices of a sequence are in flight together before its first
backward.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.schedule import build_schedule
from ds_infinipipe.planner.search.lean.candidates import CandidateSpace, LeanCandidate
from ds_infinipipe.planner.search.lean.packing import StreamShape, cut_batch, join_bins
from ds_infinipipe.planner.search.lean.stream import simulate_s, stream_costs

__all__ = ["WholeChunks", "iterate_whole"]

IntArray: TypeAlias = NDArray[np.int64]

_FEW_LAYERS = 4


@dataclass(frozen=True)
class WholeChunks:
    """Memory of a chunk of whole sequences on the only stage: it is alone there."""

    memory: MemoryModel
    most_tokens: int

    @property
    def layers(self) -> int:
        return self.memory.layout.stage_layers[0]

    def fits(self, tokens: int, recompute: int) -> bool:
        chunk = Chunk((Slice(0, 0, tokens, True),), -tokens % self.memory.layout.sp)
        forward = self.memory.forward_transient(0, chunk, recompute)
        backward = self.memory.backward_transient(0, chunk, recompute)
        held = self.memory.static_bytes[0] + self.memory.held_bytes(0, chunk, recompute)
        return held + max(forward, backward) <= self.memory.setup.limit_bytes

    def capacity(self, recompute: int) -> int:
        """Most tokens that fit, at most `most_tokens`; a multiple of sp, 0 where none do."""
        sp = self.memory.layout.sp
        low, high = 0, -(-self.most_tokens // sp) + 1
        while low + 1 < high:
            middle = (low + high) // 2
            if self.fits(middle * sp, recompute):
                low = middle
            else:
                high = middle
        return low * sp

    @cached_property
    def capacities(self) -> IntArray:
        """By recomputed layers, [layers + 1]."""
        return np.array([self.capacity(n) for n in range(self.layers + 1)], dtype=np.int64)

    def fewest_layers(self, tokens: IntArray) -> IntArray | None:
        """Fewest recomputed layers with which each of so many tokens fits; None where none do."""
        enough = self.capacities[None, :] >= tokens[:, None]
        return enough.argmax(axis=1) if enough.any(axis=1).all() else None


def iterate_whole(space: CandidateSpace) -> Iterator[tuple[LeanCandidate, IntArray]]:
    """Candidates and counts [1, chunks] that fit; none where a sequence has to be cut.

    Chunks are as large as fits with few, some or all layers recomputed, filled by best fit or
    evenly; each then recomputes as few layers as it needs.
    """
    recompute, longest = space.settings.recompute, int(space.batch.lengths[0])
    given, total = space.settings.token_limit, int(space.batch.lengths.sum())
    most = total if given == "auto" else min(total, given)
    whole = WholeChunks(space.memory, most)
    levels = {*range(_FEW_LAYERS + 1), *(whole.layers * i // 4 for i in range(1, 5))}
    if recompute != "adaptive":
        levels = {0} if recompute == "none" else {whole.layers}
    sizes = {min(int(whole.capacities[n]), most) for n in levels if n <= whole.layers}
    if longest > most or (recompute != "adaptive" and max(sizes) < longest):
        return
    for size in sorted(sizes - {0}):
        for bins in _packings(space, size):
            counts = _counts(whole, bins, space)
            if counts is not None:
                yield _candidate(space, bins, size, counts), counts


def _packings(space: CandidateSpace, size: int) -> Iterator[IntArray]:
    """Bin of each sequence, longest first: by best fit, then as many bins of even tokens."""
    lengths = space.batch.lengths.tolist()
    tight = _best_fit(lengths, size)
    yield _with_less_padding(tight, space.batch.lengths, size, space.sp)
    even = _lightest_first(lengths, int(tight.max()) + 1)
    if not np.array_equal(even, tight):
        yield _with_less_padding(even, space.batch.lengths, size, space.sp)


def _with_less_padding(bins: IntArray, lengths: IntArray, size: int, sp: int) -> IntArray:
    """The same with sequences swapped for some of the lightest bin, which then pads for all.

    The swap for a bin leaves it a multiple of sp and moves the fewest tokens.
    """
    bins = bins.copy()
    tokens = np.bincount(bins, weights=lengths).astype(np.int64)
    lightest = int(tokens.argmin())
    for number in range(tokens.size):
        excess = int(tokens[number] % sp)
        if number == lightest or excess == 0 or max(tokens[number], tokens[lightest]) > size:
            continue
        given, taken = np.flatnonzero(bins == number), np.flatnonzero(bins == lightest)
        moved = lengths[given][:, None] - lengths[taken][None, :]
        is_good = (moved % sp == excess) & (tokens[lightest] + moved <= size)
        is_good &= tokens[number] - moved <= size
        if is_good.any():
            cost = np.where(is_good, np.abs(moved), size)
            give, take = np.unravel_index(int(cost.argmin()), cost.shape)
            bins[given[give]], bins[taken[take]] = lightest, number
            tokens[number] -= moved[give, take]
            tokens[lightest] += moved[give, take]
    return bins


def _best_fit(lengths: list[int], size: int) -> IntArray:
    """Each into the bin with the least room that holds it; one above `size` is alone."""
    chosen = np.empty(len(lengths), dtype=np.int64)
    rooms: list[tuple[int, int]] = []
    num_bins = 0
    for index, length in enumerate(lengths):
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = max(size, length), num_bins
            num_bins += 1
        chosen[index] = number
        insort(rooms, (room - length, number))
    return chosen


def _lightest_first(lengths: list[int], num_bins: int) -> IntArray:
    """Each into the bin with the fewest tokens so far."""
    chosen = np.empty(len(lengths), dtype=np.int64)
    loads = [(0, number) for number in range(num_bins)]
    for index, length in enumerate(lengths):
        load, number = loads.pop(0)
        chosen[index] = number
        insort(loads, (load + length, number))
    return chosen


def _counts(whole: WholeChunks, bins: IntArray, space: CandidateSpace) -> IntArray | None:
    """Fewest layers of every chunk, [1, chunks]; None where one does not fit."""
    tokens = np.bincount(bins, weights=space.batch.lengths).astype(np.int64)
    recompute, greedy = space.settings.recompute, space.settings.solver == "greedy"
    if recompute == "full":
        fits = bool((tokens <= whole.capacities[-1]).all())
        return np.full((1, tokens.size), whole.layers, dtype=np.int64) if fits else None
    counts = whole.fewest_layers(tokens)
    if counts is None or (recompute == "none" and counts.any()):
        return None
    return np.full_like(counts, counts.max())[None, :] if greedy else counts[None, :]


def _candidate(space: CandidateSpace, bins: IntArray, size: int, counts: IntArray) -> LeanCandidate:
    uncut = cut_batch(space.batch, space.cost, np.inf, size, 1, space.sp)
    packed = join_bins(space.batch, uncut, bins)
    costs = stream_costs(packed, space.cost)
    backward_s = costs.backward_s[0] + counts[0] * costs.recompute_s
    order = [*range(packed.num_chunks)]
    order.append(order.pop(int(backward_s.argmax())))
    schedule = build_schedule(order, order, [[1] * packed.num_chunks])
    bound_s = simulate_s(schedule, costs, sums=space.sums)
    target_s = bound_s / packed.num_chunks
    return LeanCandidate(
        1, target_s, size, StreamShape(), packed, schedule, costs, bound_s, space.sums
    )
