"""Memory of whole schedules as arrays: peaks, moments and rows for any windows, compiled.

The same figures as MemoryModel.peak_bytes and rows.py, for any operation lists and free recompute
counts per stage and chunk. All counts are [pp, chunks], by chunk id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.rows import StageMoments, sequence_bytes
from ds_infinipipe.planner.schedule_arrays import ScheduleArrays, check_shape, load_kernels
from ds_infinipipe.planner.types import Chunk

__all__ = ["MemoryArrays", "StageRows"]

IntArray: TypeAlias = NDArray[np.int64]


_NO_SPLIT = tuple(np.zeros((0,) * n, dtype=np.int64) for n in (2, 2, 3))


@dataclass(frozen=True, eq=False)
class StageRows:
    """Rows `sum over row's chunks of saving[chunk] * c(chunk) >= need` of one stage.

    Compressed: row i has chunks[offsets[i] : offsets[i + 1]], in forward order. Chunks in no row
    need no recomputation on the stage.
    """

    need: IntArray
    offsets: IntArray
    chunks: IntArray


@dataclass(frozen=True, slots=True)
class _MeasuredChunk(Chunk):
    """A chunk with its sums at hand: the memory model asks for them many times."""

    tokens: int = 0
    padded_tokens: int = 0
    keeps_kv: bool = False
    context_len: int = 0
    split_tokens: int = 0
    longest_segment: int = 0

    @classmethod
    def of(cls, chunk: Chunk, longest_segment: int) -> _MeasuredChunk:
        tokens = chunk.tokens
        return cls(
            chunk.slices,
            chunk.padding,
            tokens,
            tokens + chunk.padding,
            chunk.keeps_kv,
            chunk.context_len,
            chunk.split_tokens,
            longest_segment,
        )


class MemoryArrays:
    """Bytes of one candidate's chunks on every stage; asked for once, scanned often.

    Of the transfers of one schedule at a time.

    With nothing recomputed F(k) adds entered[p, k], B(k) adds gradient[p, k] at its start and
    removes released[p, k] at its end; a recomputed layer keeps saving[k] less. `layers` and
    `static` are [pp].
    """

    def __init__(
        self,
        memory: MemoryModel,
        chunks: Sequence[Chunk],
        longest_segments: Sequence[int] | None = None,
    ) -> None:
        """`longest_segments` are those of the chunks that `chunks` are outlines of, if they are."""
        self._memory = memory
        longest = longest_segments or [chunk.longest_segment for chunk in chunks]
        pairs = zip(chunks, longest, strict=True)
        self._chunks = tuple(_MeasuredChunk.of(*pair) for pair in pairs)
        self.layers = np.array(memory.layout.stage_layers, dtype=np.int64)
        self.static = np.array(memory.static_bytes, dtype=np.int64)
        per_stage = self.layers[:, None]
        saved = np.array([memory.saved_bytes(c) for c in self._chunks], dtype=np.int64)
        inputs = np.array([memory.input_bytes(c) for c in self._chunks], dtype=np.int64)
        self._hidden = inputs
        self._in_transfer: tuple[ScheduleArrays, IntArray] | None = None
        output = np.array(
            [[memory.output_bytes(p, c) for c in self._chunks] for p in range(self.layers.size)],
            dtype=np.int64,
        )
        opened, gradient, closed = sequence_bytes(memory, self._chunks)
        self._closed = closed
        kept = per_stage * saved + output
        self.saving: IntArray = saved - inputs
        self.entered: IntArray = kept + per_stage * opened
        self.gradient: IntArray = per_stage * gradient
        self.released: IntArray = kept + per_stage * closed

    def peaks(self, schedule: ScheduleArrays, counts: IntArray | None = None) -> IntArray:
        """Peak bytes of every stage, model states included; [pp].

        Raises ScheduleError where the schedule or the counts do not belong to these chunks.
        """
        self._check(schedule)
        if counts is None:
            counts, transients = np.zeros(self.entered.shape, dtype=np.int64), self._plain
        else:
            counts, transients = np.ascontiguousarray(counts, dtype=np.int64), self.transients
        check_shape("recompute counts", counts, self.entered.shape)
        split = self.split if schedule.is_split else _NO_SPLIT
        peaks: IntArray = load_kernels().peak_bytes(
            schedule.operations,
            *self.amounts,
            transients,
            self.transfers(schedule),
            self.layers,
            counts,
            *split,
        )
        return peaks

    def transfers(self, schedule: ScheduleArrays) -> IntArray:
        """Bytes in transfer beside every operation [pp, m], as `transfer_bytes` has them."""
        if self._in_transfer is None or self._in_transfer[0] is not schedule:
            found = load_kernels().transfer_bytes(schedule.operations, self._hidden)
            self._in_transfer = (schedule, found)
        return self._in_transfer[1]

    def moments(self, schedule: ScheduleArrays) -> tuple[StageMoments, ...]:
        """Live bytes and what recomputing can save at every operation of every stage."""
        self._check(schedule)
        if schedule.is_split:
            raise ScheduleError("moments are those of whole backwards, the operations have I and W")
        figures = load_kernels().scan_moments(
            schedule.operations, *self.amounts, self.transients, self.transfers(schedule)
        )
        is_backward = schedule.operations < 0
        chunk = np.where(is_backward, -schedule.operations - 1, schedule.operations)
        return tuple(
            StageMoments(
                stage, int(layers), chunk[stage], is_backward[stage], *(f[stage] for f in figures)
            )
            for stage, layers in enumerate(self.layers)
        )

    def rows(self, schedule: ScheduleArrays, limit_bytes: int) -> tuple[StageRows, ...] | None:
        """Rows that can bind, by stage; None when a stage does not fit with all recomputed.

        Counts that keep all rows fit. Some that do not may fit too: a row charges the transient of
        recomputed layers even where the chunk at work recomputes none.
        """
        parts = []
        for moments, operations in zip(self.moments(schedule), schedule.operations, strict=True):
            selected = moments.binding(limit_bytes, self.saving)
            if selected is None:
                return None
            need, keeps = selected
            rows = load_kernels().binding_rows(
                operations, keeps.astype(np.int64), need, self.saving
            )
            parts.append(StageRows(*rows))
        return tuple(parts)

    @cached_property
    def split(self) -> tuple[IntArray, IntArray, IntArray]:
        """Of I and W: stashed bytes and transient of W [pp, chunks], figures of I [pp, chunks, 4].

        The figures are those of MemoryModel.input_figures.
        """
        memory, stages = self._memory, range(self._memory.layout.pp)
        stashed, transient = (
            np.array([[method(p, c) for c in self._chunks] for p in stages], dtype=np.int64)
            for method in (memory.stash_bytes, memory.weight_transient)
        )
        pairs = list(zip(self._chunks, self._closed.tolist(), strict=True))
        figures = [[memory.input_figures(c, closed) for c, closed in pairs] for _ in stages]
        return stashed, transient, np.array(figures, dtype=np.int64)

    @cached_property
    def transients(self) -> IntArray:
        """[F or B, none or some or all layers recomputed, pp, chunks]."""
        return np.concatenate([self._plain, self._transients((1, None))], axis=1)

    @cached_property
    def _plain(self) -> IntArray:
        return self._transients((0,))

    @cached_property
    def amounts(self) -> tuple[IntArray, ...]:
        return self.static, self.entered, self.gradient, self.released, self.saving

    def _transients(self, counts: tuple[int | None, ...]) -> IntArray:
        """Transients [F or B, count, pp, chunks] for these counts, None being all layers.

        Stages of equal layers that are both first, last or inner ones are asked for once.
        """
        layers, pp = self._memory.layout.stage_layers, self._memory.layout.pp
        kinds = [(layers[p], p == 0, p == pp - 1) for p in range(pp)]
        methods = (self._memory.forward_transient, self._memory.backward_transient)
        result = np.empty((2, len(counts), pp, len(self._chunks)), dtype=np.int64)
        for stage, kind in enumerate(kinds):
            known = kinds.index(kind)
            if known < stage:
                result[:, :, stage] = result[:, :, known]
                continue
            for op, method in enumerate(methods):
                for index, count in enumerate(counts):
                    amount = layers[stage] if count is None else count
                    result[op, index, stage] = [method(stage, c, amount) for c in self._chunks]
        return result

    def _check(self, schedule: ScheduleArrays) -> None:
        pp, num_chunks = self.entered.shape
        if schedule.pp != pp or schedule.num_ids > num_chunks:
            raise ScheduleError(
                f"the operations are those of {schedule.pp} stages and at least "
                f"{schedule.num_ids} chunks, the bytes those of {pp} and {num_chunks}"
            )
