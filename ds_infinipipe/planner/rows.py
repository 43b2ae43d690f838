"""Memory of one pipeline as linear rows in the recompute counts (Eq. 19 and 20, exact form).

Every F and every B of a stage is a moment with a live set W of chunks between their F and their B.
With c(k) recomputed layers the moment needs, in bytes,

    base + transient - sum over W of saving(k) * c(k),   saving = saved - input bytes of one layer

which must not exceed the limit. The transient of the chunk at work is larger once it recomputes
every layer of the stage, so its last layer saves less in its own moments than elsewhere; with that,
a choice of counts keeps the rows exactly where it fits.
Deviation: the paper's windows leave out what only the executor shows: K/V arenas, dK/dV of the
sequence in backward, and the transients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.order import (
    backward_order,
    count_slices,
    forward_order,
    stage_operations,
    window_size,
)
from ds_infinipipe.planner.specs import Layout
from ds_infinipipe.planner.transfers import transfer_bytes
from ds_infinipipe.planner.types import Chunk, Op

__all__ = [
    "ChunkBytes",
    "MemoryRows",
    "PipelineMemory",
    "StageMoments",
    "measure_chunks",
    "pipeline_memory",
    "recompute_counts",
    "sequence_bytes",
]

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class ChunkBytes:
    """Byte figures of all chunks of a batch; arrays are [chunk] or [stage, chunk].

    `hidden` are those of a chunk's hidden states, `output` what MemoryModel.output_bytes says.
    `opened` is what the first slice's forward allocates per layer (the arena), `gradient` what the
    tail's backward allocates per layer (dK/dV), `closed` what the first slice's backward frees of
    both. Transients come without and with recomputation.
    """

    saved: IntArray
    saving: IntArray
    hidden: IntArray
    output: IntArray
    opened: IntArray
    gradient: IntArray
    closed: IntArray
    forward_plain: IntArray
    forward_recompute: IntArray
    backward_plain: IntArray
    backward_recompute: IntArray
    backward_some: IntArray


def measure_chunks(memory: MemoryModel, layout: Layout, chunks: Sequence[Chunk]) -> ChunkBytes:
    """Ask the memory model once for everything the rows of any grouping need."""
    saved = _per_chunk([memory.saved_bytes(c) for c in chunks])
    recomputed = _per_chunk([memory.input_bytes(c) for c in chunks])
    opened, gradient, closed = sequence_bytes(memory, chunks)
    stages = range(layout.pp)
    some = tuple(min(1, layers - 1) for layers in layout.stage_layers)

    def transients(method: Callable[[int, Chunk, int], int], counts: Sequence[int]) -> IntArray:
        return _per_chunk([[method(p, c, counts[p]) for c in chunks] for p in stages])

    return ChunkBytes(
        saved,
        saved - recomputed,
        recomputed,
        _per_chunk([[memory.output_bytes(p, c) for c in chunks] for p in stages]),
        opened,
        gradient,
        closed,
        transients(memory.forward_transient, (0,) * layout.pp),
        transients(memory.forward_transient, layout.stage_layers),
        transients(memory.backward_transient, (0,) * layout.pp),
        transients(memory.backward_transient, layout.stage_layers),
        transients(memory.backward_transient, some),
    )


def _per_chunk(values: Sequence[int] | Sequence[Sequence[int]]) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def sequence_bytes(
    memory: MemoryModel, chunks: Sequence[Chunk]
) -> tuple[IntArray, IntArray, IntArray]:
    """Per layer: arenas opened at first slices, dK/dV at tails, both closed at first slices."""
    first: dict[int, int] = {}
    opened, gradient, closed = (np.zeros(len(chunks), dtype=np.int64) for _ in range(3))
    for index, chunk in enumerate(chunks):
        if chunk.keeps_kv and chunk.context_len == 0:
            first[chunk.slices[0].sequence] = index
    for index, chunk in enumerate(chunks):
        if chunk.keeps_kv and chunk.slices[0].is_tail:
            head = first[chunk.slices[0].sequence]
            opened[head] = memory.arena_bytes(chunk.slices[0].end)
            gradient[index] = memory.kv_grad_bytes(chunk.context_len)
            closed[head] = opened[head] + gradient[index]
    return opened, gradient, closed


@dataclass(frozen=True)
class StageMoments:
    """All moments of one stage in the order of its operations, arrays [moment].

    `base` counts model states, live chunks with nothing recomputed, arenas and dK/dV. Transients of
    the chunk at work: `plain` with none or some of its layers recomputed, the larger of both;
    `charged` with all of them; `unrecomputed` with none, where that is known apart.
    """

    stage: int
    layers: int
    chunk: IntArray
    is_backward: NDArray[np.bool_]
    base: IntArray
    plain: IntArray
    charged: IntArray
    live_saving: IntArray
    unrecomputed: IntArray | None = None

    def peak_bytes(self, counts: IntArray, saving: IntArray) -> IntArray:
        """Bytes at every moment when chunk k recomputes counts[k] layers of this stage."""
        change = saving[self.chunk] * counts[self.chunk]
        entered = np.cumsum(np.where(self.is_backward, 0, change))
        left = np.cumsum(np.where(self.is_backward, change, 0))
        released = entered - left + np.where(self.is_backward, change, 0)
        transient = np.where(counts[self.chunk] >= self.layers, self.charged, self.plain)
        if self.unrecomputed is not None:
            transient = np.where(counts[self.chunk] == 0, self.unrecomputed, transient)
        return np.asarray(self.base + transient - released)

    def binding(
        self, limit_bytes: int, saving: IntArray
    ) -> tuple[IntArray, NDArray[np.bool_]] | None:
        """Bytes to save at every moment, and which moments need a row; those imply the others.

        None when a moment does not fit with every layer of its live chunks recomputed.
        """
        need = self.base + self.charged - limit_bytes
        fits = self.base + self.plain <= limit_bytes
        own_layers = self.layers * saving[self.chunk]
        binds = ~(fits & (need <= own_layers))
        if (need > self.layers * self.live_saving)[binds].any():
            return None
        return need, binds & ~_dominated(self, need, own_layers, np.zeros_like(need), binds)


@dataclass(frozen=True)
class MemoryRows:
    """Rows `sum of coefficient * c(stage, variable) >= need` in coordinate form.

    Arrays `row`, `variable`, `coefficient` and `last` are [entry]; `need` and `stage` are [row].
    The count of stage p and variable v is min(C[v], layers of p), Eq. 16; the last layer of the
    stage counts `last`, at most `coefficient`.
    """

    row: IntArray
    variable: IntArray
    coefficient: IntArray
    last: IntArray
    need: IntArray
    stage: IntArray

    @property
    def is_empty(self) -> bool:
        return self.need.size == 0


@dataclass(frozen=True)
class PipelineMemory:
    """Orders, moments and variables of one pipeline.

    `position[k]` is chunk k's position in the backward order (f2b), -1 for chunks outside.
    """

    layout: Layout
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    num_split: int
    position: IntArray
    stages: tuple[StageMoments, ...]
    bytes: ChunkBytes

    @property
    def num_variables(self) -> int:
        """n + pp - 1, the length of C in Eq. 15."""
        return len(self.forward) + self.layout.pp - 1

    def peaks(self, counts: IntArray) -> IntArray:
        """Largest bytes of every stage for counts[stage, i] of forward[i]."""
        spread = np.zeros((self.layout.pp, self.position.size), dtype=np.int64)
        spread[:, list(self.forward)] = counts
        return np.array(
            [
                moments.peak_bytes(spread[p], self.bytes.saving).max()
                for p, moments in enumerate(self.stages)
            ]
        )

    def uniform_count(self, limit_bytes: int) -> int | None:
        """Smallest number of layers that fits when every chunk and stage recomputes it, or None."""
        needed = 0
        for moments in self.stages:
            over_plain = moments.base + moments.plain - limit_bytes
            over = moments.base + moments.charged - limit_bytes
            if (over_plain <= 0).all():
                continue
            layers = int((-(-over_plain // np.maximum(moments.live_saving, 1))).max())
            if layers >= moments.layers and (over > moments.layers * moments.live_saving).any():
                return None
            needed = max(needed, min(layers, moments.layers))
        return needed

    def rows(self, limit_bytes: int) -> MemoryRows | None:
        """Rows that can bind, or None when one asks more than recomputing every layer gives."""
        parts = [self._stage_rows(moments, limit_bytes) for moments in self.stages]
        kept = [part for part in parts if part is not None]
        if len(kept) < len(parts):
            return None
        offsets = np.cumsum([0] + [part.need.size for part in kept])
        return MemoryRows(
            np.concatenate([part.row + o for part, o in zip(kept, offsets, strict=False)]),
            *(
                np.concatenate([getattr(part, name) for part in kept])
                for name in ("variable", "coefficient", "last", "need", "stage")
            ),
        )

    def _stage_rows(self, moments: StageMoments, limit_bytes: int) -> MemoryRows | None:
        saving = self.bytes.saving[moments.chunk]
        lost = np.maximum(moments.charged - moments.plain, 0)
        need = moments.base + moments.plain + np.maximum(lost - saving, 0) - limit_bytes
        lost, own = np.minimum(lost, saving), moments.layers * saving
        binds = (moments.base + moments.plain > limit_bytes) | (need + lost > own)
        if (need + lost > moments.layers * moments.live_saving)[binds].any():
            return None
        binding = np.flatnonzero(binds & ~_dominated(moments, need, own, lost, binds))
        chunks = np.array(self.forward, dtype=np.int64)
        entered, left = self._lifetimes(moments)
        live = (entered[None] <= binding[:, None]) & (binding[:, None] <= left[None])
        row, column = np.nonzero(live)
        chunk, at = chunks[column], binding[row]
        is_own = chunk == moments.chunk[at]
        return MemoryRows(
            row,
            self.position[chunk] + self.layout.pp - 1 - moments.stage,
            self.bytes.saving[chunk],
            self.bytes.saving[chunk] - np.where(is_own, lost[at], 0),
            need[binding],
            np.full(binding.size, moments.stage, dtype=np.int64),
        )

    def _lifetimes(self, moments: StageMoments) -> tuple[IntArray, IntArray]:
        """Moments of F and of B of every chunk, arrays [position in forward]."""
        at = np.arange(moments.chunk.size)
        times = np.zeros((2, self.position.size), dtype=np.int64)
        times[moments.is_backward.astype(np.int64), moments.chunk] = at
        chosen = times[:, list(self.forward)]
        return chosen[0], chosen[1]


def _dominated(
    moments: StageMoments,
    need: IntArray,
    own: IntArray,
    lost: IntArray,
    binds: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Moments whose row follows from a binding neighbour's: a live set within it, no larger need.

    Row W' with W inside it implies row W when need' minus all that W' \\ W can save covers need.
    `own` is what all layers of the chunk at work save, `lost` the part its last layer does not save
    at its own moments.
    """
    first_back, second_back = moments.is_backward[:-1], moments.is_backward[1:]
    earlier, later = need[:-1], need[1:]
    most = own - lost
    growing = ~first_back & ~second_back & (later - most[1:] - lost[:-1] >= earlier)
    shrinking = first_back & second_back & (earlier - most[:-1] - lost[1:] >= later)
    turn = ~first_back & second_back
    forward_follows = turn & (later - lost[:-1] >= earlier)
    backward_follows = turn & (earlier - lost[1:] >= later) & ~forward_follows
    dominated = np.zeros(need.size, dtype=np.bool_)
    dominated[:-1] |= (growing | forward_follows) & binds[1:]
    dominated[1:] |= (shrinking | backward_follows) & binds[:-1]
    return dominated


def pipeline_memory(
    chunks: Sequence[Chunk],
    members: Sequence[int],
    layout: Layout,
    static_bytes: Sequence[int],
    figures: ChunkBytes,
) -> PipelineMemory:
    """Orders of the pipeline that `members` form, and the moments of its stages.

    Beside its last operation the first receive of another pipeline counts, as for the largest of
    all chunks.
    """
    forward = forward_order(chunks, members)
    backward = backward_order(chunks, forward)
    num_split = count_slices(chunks, forward)
    position = np.full(len(chunks), -1, dtype=np.int64)
    position[list(backward)] = np.arange(len(backward))
    operations = [
        stage_operations(forward, backward, window_size(layout.pp, stage, num_split))
        for stage in range(layout.pp)
    ]
    transfers = np.array(transfer_bytes(operations, figures.hidden.tolist()), dtype=np.int64)
    if len(members) < len(chunks):
        transfers[1:, -1] += figures.hidden.max()
    stages = [
        _moments(stage, layout, static_bytes[stage] + transfers[stage], operations[stage], figures)
        for stage in range(layout.pp)
    ]
    return PipelineMemory(layout, forward, backward, num_split, position, tuple(stages), figures)


def _moments(
    stage: int,
    layout: Layout,
    present: IntArray,
    operations: Sequence[tuple[Op, int]],
    figures: ChunkBytes,
) -> StageMoments:
    """`present` is what is there at every operation whatever the chunks keep."""
    layers = layout.stage_layers[stage]
    chunk = np.array([k for _, k in operations], dtype=np.int64)
    backward = np.array([op is Op.BACKWARD for op, _ in operations])
    kept = layers * figures.saved[chunk] + figures.output[stage, chunk]
    enter = np.where(
        backward, layers * figures.gradient[chunk], kept + layers * figures.opened[chunk]
    )
    leave = np.where(backward, kept + layers * figures.closed[chunk], 0)
    saving = figures.saving[chunk]
    backward_plain = np.maximum(figures.backward_plain, figures.backward_some)
    return StageMoments(
        stage,
        layers,
        chunk,
        backward,
        present + np.cumsum(enter - leave) + leave,
        np.where(backward, backward_plain[stage, chunk], figures.forward_plain[stage, chunk]),
        np.where(
            backward,
            figures.backward_recompute[stage, chunk],
            figures.forward_recompute[stage, chunk],
        ),
        np.cumsum(np.where(backward, -saving, saving)) + np.where(backward, saving, 0),
        np.where(
            backward, figures.backward_plain[stage, chunk], figures.forward_plain[stage, chunk]
        ),
    )


def recompute_counts(pipeline: PipelineMemory, variables: IntArray) -> IntArray:
    """Eq. 16 with 0-based stages: counts[p, i] = min(C[f2b + pp - 1 - p], layers of p)."""
    layout = pipeline.layout
    at = pipeline.position[list(pipeline.forward)]
    return np.array(
        [
            np.minimum(variables[at + layout.pp - 1 - stage], layers)
            for stage, layers in enumerate(layout.stage_layers)
        ]
    )
