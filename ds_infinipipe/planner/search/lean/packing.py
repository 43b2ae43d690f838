"""A batch to balanced chunks: long sequences cut, the short ones packed beside any slice.

Each long sequence is cut by a mesh of its own, so that no slice is a small rest; packing takes the
longest first (LPT).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.area import AttentionArea
from ds_infinipipe.planner.predict.time import CostModel

__all__ = [
    "PackedBatch",
    "SliceMesh",
    "SortedBatch",
    "cut_batch",
    "join_bins",
    "pack_batch",
    "stage_rates",
]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
_ROUNDING = 1e-9  # of a chunk: what sums of times may be off, which opens no chunk


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
    from ds_infinipipe.planner.search.lean import kernels

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


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How a stream begins and ends.

    `lead` and `trail` are shares of a full chunk's time that the first and the last chunks take:
    stages fill and drain faster with light chunks. `growth` is how many chunks the window may
    grow per backward before a cut sequence's turn; 0 keeps the largest window from the start.
    """

    lead: tuple[float, ...] = ()
    trail: tuple[float, ...] = ()
    growth: float = 0.0
    extra: int = 0
    spread: int = 1
    """Full chunks that follow each other come from as many size classes, to use less memory."""

    def num_early(self, num_split: int) -> int:
        """Full chunks before the cut sequences, enough for the window to grow."""
        return math.ceil((num_split - 1) / self.growth) if self.growth else 0


@dataclass(frozen=True, eq=False)
class SortedBatch:
    """Sequences by falling length: `sequence` [n] their numbers in the batch, ties by number.

    `whole_s` is T_tot of each as a chunk of its own, `work_s` its share of a larger chunk, `areas`
    its attention.
    """

    sequence: IntArray
    lengths: IntArray
    whole_s: FloatArray
    work_s: FloatArray
    areas: IntArray

    @classmethod
    def of(cls, lengths: Sequence[int], cost: CostModel) -> SortedBatch:
        given = np.array(lengths, dtype=np.int64)
        order = np.argsort(-given, kind="stable")
        ordered = given[order]
        sizes, areas = ordered.astype(np.float64), cost.area.before(ordered)
        whole_s = cost.total_times(sizes, areas.astype(np.float64))
        c = cost.coefficients
        linear_s = (3 * c.linear_s + 2 * c.all2all_s) * sizes
        quadratic_s = (c.attention_forward_s + c.attention_backward_s) * areas
        work_s = cost.mean_layers * (linear_s + quadratic_s)
        return cls(order, ordered, whole_s, work_s, areas)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Chunks in forward order, so that chunk ids are positions; arrays [chunk] or [short].

    `sequence`, `start`, `length` and `is_tail` are those of the cut slice; -1, 0, 0 and False in a
    batched chunk, whose `slices` is 1. Otherwise that is the number of slices of the sequence.
    `tokens` and `areas` are without padding. `shorts` are whole sequences by falling length,
    `short_chunk` the chunk of each.
    """

    sequence: IntArray
    start: IntArray
    length: IntArray
    is_tail: NDArray[np.bool_]
    slices: IntArray
    tokens: IntArray
    areas: IntArray
    shorts: IntArray
    short_lengths: IntArray
    short_chunk: IntArray

    @property
    def num_chunks(self) -> int:
        return int(self.tokens.size)

    def padded_sizes(self, sp: int, area: AttentionArea) -> tuple[FloatArray, FloatArray]:
        """Tokens and areas with each chunk padded to a multiple of sp."""
        padding = -self.tokens % sp
        tokens = (self.tokens + padding).astype(np.float64)
        return tokens, (self.areas + area.before(padding)).astype(np.float64)

    def outlines(self, sp: int) -> tuple[Chunk, ...]:
        """Chunks of equal sizes, with one stand-in for all shorts of a chunk.

        Their bytes are equal too, where those know the `longest_segments`.
        """
        rest = self.tokens - self.length
        outlines = []
        for sequence, start, length, is_tail, whole, padding in zip(
            self.sequence.tolist(),
            self.start.tolist(),
            self.length.tolist(),
            self.is_tail.tolist(),
            rest.tolist(),
            (-self.tokens % sp).tolist(),
            strict=True,
        ):
            pieces = [Slice(sequence, start, length, is_tail)] if sequence >= 0 else []
            pieces += [Slice(-1, 0, whole, True)] if whole else []
            outlines.append(Chunk(tuple(pieces), padding))
        return tuple(outlines)

    def longest_segments(self, sp: int) -> list[int]:
        """`longest_segment` of each chunk."""
        longest = np.maximum(np.where(self.sequence >= 0, self.length, 0), -self.tokens % sp)
        np.maximum.at(longest, self.short_chunk, self.short_lengths)
        return [int(length) for length in longest]

    def chunks(self, sp: int) -> tuple[Chunk, ...]:
        """The same as Chunk objects."""
        contents: list[list[Slice]] = [[] for _ in range(self.num_chunks)]
        cut = zip(
            self.sequence.tolist(),
            self.start.tolist(),
            self.length.tolist(),
            self.is_tail.tolist(),
            strict=True,
        )
        for content, (sequence, start, length, is_tail) in zip(contents, cut, strict=True):
            if sequence >= 0:
                content.append(Slice(sequence, start, length, is_tail))
        shorts = zip(
            self.shorts.tolist(),
            self.short_lengths.tolist(),
            self.short_chunk.tolist(),
            strict=True,
        )
        for sequence, length, chunk in shorts:
            contents[chunk].append(Slice(sequence, 0, length, True))
        padding = (-self.tokens % sp).tolist()
        return tuple(Chunk(tuple(c), p) for c, p in zip(contents, padding, strict=True))


def stage_rates(cost: CostModel) -> FloatArray:
    """What the packing kernel balances: time on the last stage, which has the loss besides."""
    c = cost.coefficients
    return np.array(
        [
            c.linear_s,
            c.attention_forward_s,
            c.attention_backward_s,
            c.all2all_s,
            c.overhead_forward_s,
            c.overhead_backward_s,
            c.gather_s,
            c.gather_overlap,
            cost.layout.stage_layers[-1],
            c.latency_s,
            3 * c.logits_s,
        ]
    )


def pack_batch(
    batch: SortedBatch,
    mesh: SliceMesh,
    rates: FloatArray,
    target_s: float,
    max_tokens: int,
    shape: StreamShape,
) -> PackedBatch:
    """LPT: each whole sequence into the least loaded chunk with room, a slice's or an empty one.

    So many empty chunks are opened that `target_s` and `max_tokens` can hold, those of the ramps
    included.
    """
    from ds_infinipipe.planner.search.lean import kernels

    lengths = batch.lengths[mesh.num_cut :]
    shares = _empty_shares(batch, mesh, target_s, max_tokens, shape)
    empty = np.zeros(shares.size, dtype=np.int64)
    chosen, tokens, areas = kernels.pack_shorts(
        lengths,
        batch.areas[mesh.num_cut :],
        np.concatenate([mesh.length, empty]),
        np.concatenate([mesh.areas, empty]),
        np.concatenate([np.zeros(mesh.length.size), target_s * (1 - shares)]),
        max_tokens,
        rates,
    )
    order = _stream_order(mesh, tokens, shape, shares)
    return _in_forward_order(batch, mesh, chosen, tokens, areas, order)


def join_bins(batch: SortedBatch, mesh: SliceMesh, bins: IntArray) -> PackedBatch:
    """Chunks of whole sequences: `bins` [n] has the chunk of each, all of 0 to the last in use."""
    # sums of whole numbers, exact in float64
    tokens, areas = (
        np.bincount(bins, weights=sizes).astype(np.int64) for sizes in (batch.lengths, batch.areas)
    )
    return _in_forward_order(batch, mesh, bins, tokens, areas, np.arange(tokens.size))


def _empty_shares(
    batch: SortedBatch, mesh: SliceMesh, target_s: float, max_tokens: int, shape: StreamShape
) -> FloatArray:
    """Share of the target that each empty chunk shall take: first the ramps, then 1."""
    work_s = float(batch.work_s[mesh.num_cut :].sum())
    free_s = float(np.maximum(0.0, target_s - mesh.times_s).sum())
    tokens = int(batch.lengths[mesh.num_cut :].sum())
    free_tokens = int(np.maximum(0, max_tokens - mesh.length).sum())
    ramps = [*shape.lead, *shape.trail]
    needed = max((work_s - free_s) / target_s, (tokens - free_tokens) / max_tokens)
    if needed < sum(ramps) + 1:
        ramps = []
    full = max(0, math.ceil(needed - sum(ramps) - _ROUNDING))
    if mesh.length.size + len(ramps) == 0:
        full = max(1, full)
    return np.array([*ramps, *[1.0] * full], dtype=np.float64)


def _in_forward_order(
    batch: SortedBatch,
    mesh: SliceMesh,
    chosen: IntArray,
    tokens: IntArray,
    areas: IntArray,
    order: IntArray,
) -> PackedBatch:
    """`order` are the bins in use; slices are the first bins."""
    num_cut_bins = mesh.length.size
    is_cut = order < num_cut_bins
    at = np.where(is_cut, order, 0)

    def of_slice(values: IntArray, otherwise: int) -> IntArray:
        if num_cut_bins == 0:
            return np.full(order.size, otherwise, dtype=np.int64)
        return np.where(is_cut, values[at], otherwise)

    position = np.empty(tokens.size, dtype=np.int64)
    position[order] = np.arange(order.size)
    return PackedBatch(
        sequence=of_slice(mesh.sequence, -1),
        start=of_slice(mesh.start, 0),
        length=of_slice(mesh.length, 0),
        is_tail=of_slice(mesh.is_tail.astype(np.int64), 0).astype(np.bool_),
        slices=of_slice(mesh.slices, 1),
        tokens=tokens[order],
        areas=areas[order],
        shorts=batch.sequence[mesh.num_cut :],
        short_lengths=batch.lengths[mesh.num_cut :],
        short_chunk=position[chosen],
    )


def _stream_order(
    mesh: SliceMesh, tokens: IntArray, shape: StreamShape, shares: FloatArray
) -> IntArray:
    """Bins in use: ramp up, early full chunks, cut sequences by slices, full chunks, ramp down.

    Ramps by rising and falling tokens, full chunks by falling tokens, ties by bin.
    """
    num_cut_bins = mesh.length.size
    has_ramps = bool((shares < 1).any())
    num_lead = len(shape.lead) if has_ramps else 0
    num_trail = len(shape.trail) if has_ramps else 0
    bins = np.arange(num_cut_bins, tokens.size)
    bins = bins[np.argsort(-tokens[bins], kind="stable")]
    ramp = bins - num_cut_bins
    lead = bins[ramp < num_lead][::-1]
    trail = bins[(ramp >= num_lead) & (ramp < num_lead + num_trail)]
    full = bins[ramp >= num_lead + num_trail]
    full = _spread(full, shape.spread)
    early = shape.num_early(int(mesh.slices.max(initial=1)))
    blocks = np.lexsort((mesh.rank, -mesh.slices))  # stable: slices of a sequence stay in order
    order = np.concatenate([lead, full[:early], blocks, full[early:], trail])
    return np.asarray(order[tokens[order] > 0])


def _spread(bins: IntArray, num_classes: int) -> IntArray:
    """One bin of each of `num_classes` equal parts in turn."""
    part = max(1, -(-bins.size // num_classes))
    return bins[np.argsort(np.arange(bins.size) % part, kind="stable")]
