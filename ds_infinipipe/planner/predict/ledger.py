"""Bytes of a batch's chunks as arrays, and what folds over them: peaks, moments and rows.

For any operation lists and free recompute counts per stage and chunk, by the one compiled walk of
kernels.py. All counts are [pp, chunks], by chunk id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import SPLIT
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.schedule import (
    ScheduleArrays,
    check_shape,
    load_kernels,
    stream_schedule,
)

if TYPE_CHECKING:
    from ds_infinipipe.planner.predict.kernels import Bytes

__all__ = [
    "PART_NAMES",
    "Ledger",
    "StageMoments",
    "StageRows",
    "dominated",
    "plan_ledger",
    "plan_peaks",
]

IntArray: TypeAlias = NDArray[np.int64]

PART_NAMES = ("states", "activations", "kv_arenas", "kv_gradients", "stashes", "transient")
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


@dataclass(frozen=True, eq=False)
class StageMoments:
    """All moments of one stage in the order of its operations, arrays [moment].

    `base` counts model states, transfers, and live chunks with nothing recomputed, `most_saving` is
    what comes off it with all layers of all of them recomputed. Transients of the chunk at work:
    `plain` with none or some of its layers recomputed, the larger of both; `every` with all.
    """

    stage: int
    layers: int
    chunk: IntArray
    is_backward: NDArray[np.bool_]
    base: IntArray
    plain: IntArray
    every: IntArray
    most_saving: IntArray

    @property
    def live_saving(self) -> IntArray:
        """What comes off `base` with each layer recomputed of all live chunks."""
        return self.most_saving // self.layers

    def binding(
        self, limit_bytes: int, saving: IntArray
    ) -> tuple[IntArray, NDArray[np.bool_]] | None:
        """Bytes to save at every moment, and which moments need a row; those imply the others.

        None when a moment does not fit with every layer of its live chunks recomputed.
        """
        charged = np.maximum(self.plain, self.every)
        need = self.base + charged - limit_bytes
        # of a single layer some is all
        fits = self.base + (self.plain if self.layers > 1 else charged) <= limit_bytes
        own_layers = self.layers * saving[self.chunk]
        binds = ~(fits & (need <= own_layers))
        if (need > self.most_saving)[binds].any():
            return None
        return need, binds & ~dominated(self, need, own_layers, np.zeros_like(need), binds)


def dominated(
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
    result = np.zeros(need.size, dtype=np.bool_)
    result[:-1] |= (growing | forward_follows) & binds[1:]
    result[1:] |= (shrinking | backward_follows) & binds[:-1]
    return result


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


class Ledger:
    """What the operations of every chunk add on every stage, need meanwhile, and remove.

    Asked of the memory model once, folded over often; `kernels.Bytes` says what the arrays are.
    `layers` and `static` are [pp], `hidden` (of the hidden states) and `saving` [chunks].
    """

    def __init__(
        self,
        memory: MemoryModel,
        chunks: Sequence[Chunk],
        longest_segments: Sequence[int] | None = None,
    ) -> None:
        """`longest_segments` are those of the chunks that `chunks` are outlines of, if they are."""
        self._memory = memory
        self.layout = memory.layout
        longest = longest_segments or [chunk.longest_segment for chunk in chunks]
        pairs = zip(chunks, longest, strict=True)
        self.chunks: tuple[Chunk, ...] = tuple(_MeasuredChunk.of(*pair) for pair in pairs)
        self.shape = memory.layout.pp, len(chunks)
        self.layers = np.array(memory.layout.stage_layers, dtype=np.int64)
        self.static = np.array(memory.static_bytes, dtype=np.int64)
        saved = np.array([memory.saved_bytes(c) for c in self.chunks], dtype=np.int64)
        self.hidden = np.array([memory.input_bytes(c) for c in self.chunks], dtype=np.int64)
        self.saving: IntArray = saved - self.hidden
        self._in_transfer: tuple[ScheduleArrays, IntArray] | None = None
        per_stage, stages = self.layers[:, None], range(memory.layout.pp)
        output = [[memory.output_bytes(p, c) for c in self.chunks] for p in stages]
        kept = per_stage * saved + np.array(output, dtype=np.int64)
        opened, gradient, self._closed = self._sequence_bytes()
        self._arena: IntArray = per_stage * opened
        self._entered: IntArray = kept + self._arena
        self._gradient: IntArray = per_stage * gradient
        self._released: IntArray = kept + per_stage * self._closed

    def peaks(
        self,
        schedule: ScheduleArrays,
        counts: IntArray | None = None,
        transfers: IntArray | None = None,
    ) -> IntArray:
        """Peak bytes of every stage, model states included; [pp] (Eq. 8).

        `counts` are none where they are not given; `transfers` [pp, m] are in transfer beside the
        operations, by default those of the schedule alone. Raises ScheduleError where the schedule
        or the counts do not belong to these chunks.
        """
        self._check(schedule)
        amounts = self.amounts(schedule.is_split, is_plain=counts is None)
        layers = np.zeros(self.shape, dtype=np.int64) if counts is None else counts
        check_shape("recompute counts", layers, self.shape)
        peaks: IntArray = load_kernels().peak_bytes(
            schedule.operations,
            amounts,
            self.transfers(schedule) if transfers is None else transfers,
            np.ascontiguousarray(layers, dtype=np.int64),
        )
        return peaks

    def moments(
        self, schedule: ScheduleArrays, transfers: IntArray | None = None
    ) -> tuple[StageMoments, ...]:
        """What is alive at every operation of every stage, and what recomputing can save there.

        `transfers` are as for `peaks`. Raises ScheduleError also where backwards are split.
        """
        self._check(schedule)
        if schedule.is_split:
            raise ScheduleError("moments are those of whole backwards, the operations have I and W")
        operations, amounts = schedule.operations, self.amounts(is_split=False)
        moving = self.transfers(schedule) if transfers is None else transfers
        is_backward = operations < 0
        chunk = np.where(is_backward, -operations - 1, operations)
        walk = load_kernels().stage_moments
        return tuple(
            StageMoments(
                *(stage, layers, chunk[stage], is_backward[stage]),
                *walk(operations, amounts, moving, stage),
            )
            for stage, layers in enumerate(self.layout.stage_layers)
        )

    def parts(self, schedule: ScheduleArrays, counts: IntArray) -> tuple[IntArray, IntArray]:
        """What is alive beside every operation, and after it: two arrays [part, pp, m].

        Parts are those of PART_NAMES. The bytes in transfer are activations.
        """
        self._check(schedule)
        full = self.amounts(schedule.is_split)
        nothing = full._replace(**{name: 0 * figures for name, figures in full._asdict().items()})
        nothing = nothing._replace(layers=self.layers)
        gradient = self.layers[:, None] * self._closed - self._arena
        own = {"entered": self._entered - self._arena, "saving": self.saving}
        selected = (
            nothing._replace(static=self.static),
            nothing._replace(**own, released=self._released - self._arena - gradient),
            nothing._replace(entered=self._arena, released=self._arena),
            nothing._replace(gradient=self._gradient, released=gradient),
            nothing._replace(stashed=full.stashed),
        )
        layers, still = np.ascontiguousarray(counts), np.zeros_like(schedule.operations)

        def walk(amounts: Bytes, is_after: bool = False) -> tuple[list[IntArray], list[IntArray]]:
            stages = [
                load_kernels().walk_bytes(
                    schedule.operations, amounts, still, layers[stage], stage, is_after
                )
                for stage in range(schedule.pp)
            ]
            return [alive for alive, *_ in stages], [transient for _, transient, _ in stages]

        during = np.array([*(walk(amounts)[0] for amounts in selected), walk(full)[1]])
        after = np.array([*(walk(amounts, True)[0] for amounts in selected), still])
        moving = self.transfers(schedule)
        during[1] += moving
        after[1] += moving + self._sent(schedule)
        return during, after

    def _sent(self, schedule: ScheduleArrays) -> IntArray:
        """After B and I more is in transfer than beside them: what they made, not what came."""
        codes = schedule.operations
        is_back = codes < 0
        chunk = np.where(is_back, -codes - 1 - np.where(codes < -SPLIT, SPLIT, 0), 0)
        stage = np.arange(schedule.pp)[:, None]
        change = (stage > 0).astype(np.int64) - (stage + 1 < schedule.pp)
        return np.asarray(np.where(is_back, self.hidden[chunk] * change, 0))

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

    def transfers(self, schedule: ScheduleArrays) -> IntArray:
        """Bytes in transfer beside every operation, [pp, m]; of one schedule at a time."""
        if self._in_transfer is None or self._in_transfer[0] is not schedule:
            found = load_kernels().transfer_bytes(schedule.operations, self.hidden)
            self._in_transfer = (schedule, found)
        return self._in_transfer[1]

    def amounts(self, is_split: bool, is_plain: bool = False) -> Bytes:
        """What the compiled walks take; with `is_plain` only where nothing is recomputed."""
        amounts: Bytes = load_kernels().Bytes(
            self.static,
            self.layers,
            self.saving,
            self._entered,
            self._gradient,
            self._released,
            self._plain if is_plain else self._all_transients,
            *(self._split if is_split else _NO_SPLIT),
        )
        return amounts

    def _sequence_bytes(self) -> tuple[IntArray, IntArray, IntArray]:
        """Per layer: arenas opened at first slices, dK/dV at tails, both closed at first slices."""
        heads = {
            chunk.slices[0].sequence: index
            for index, chunk in enumerate(self.chunks)
            if chunk.keeps_kv and chunk.context_len == 0
        }
        opened, gradient, closed = np.zeros((3, len(self.chunks)), dtype=np.int64)
        for index, chunk in enumerate(self.chunks):
            if chunk.keeps_kv and chunk.slices[0].is_tail:
                head = heads[chunk.slices[0].sequence]
                opened[head] = self._memory.arena_bytes(chunk.slices[0].end)
                gradient[index] = self._memory.kv_grad_bytes(chunk.context_len)
                closed[head] = opened[head] + gradient[index]
        return opened, gradient, closed

    @cached_property
    def _split(self) -> tuple[IntArray, IntArray, IntArray]:
        """Of I and W: stashed bytes and transient of W [pp, chunks], figures of I [pp, chunks, 4].

        The figures are those of MemoryModel.input_figures.
        """
        memory, stages = self._memory, range(self.layout.pp)
        stashed, transient = (
            np.array([[method(p, c) for c in self.chunks] for p in stages], dtype=np.int64)
            for method in (memory.stash_bytes, memory.weight_transient)
        )
        pairs = list(zip(self.chunks, self._closed.tolist(), strict=True))
        figures = [[memory.input_figures(c, closed) for c, closed in pairs] for _ in stages]
        return stashed, transient, np.array(figures, dtype=np.int64)

    @cached_property
    def _all_transients(self) -> IntArray:
        """[F or B, none or some or all layers recomputed, pp, chunks]."""
        return np.concatenate([self._plain, self._transients((1, None))], axis=1)

    @cached_property
    def _plain(self) -> IntArray:
        return self._transients((0,))

    def _transients(self, counts: tuple[int | None, ...]) -> IntArray:
        """Transients [F or B, count, pp, chunks] for these counts, None being all layers.

        Stages of equal layers that are both first, last or inner ones are asked for once.
        """
        layers, pp = self.layout.stage_layers, self.layout.pp
        kinds = [(layers[p], p == 0, p == pp - 1) for p in range(pp)]
        methods = (self._memory.forward_transient, self._memory.backward_transient)
        result = np.empty((2, len(counts), pp, len(self.chunks)), dtype=np.int64)
        for stage, kind in enumerate(kinds):
            known = kinds.index(kind)
            if known < stage:
                result[:, :, stage] = result[:, :, known]
                continue
            for op, method in enumerate(methods):
                for index, count in enumerate(counts):
                    amount = layers[stage] if count is None else count
                    result[op, index, stage] = [method(stage, c, amount) for c in self.chunks]
        return result

    def _check(self, schedule: ScheduleArrays) -> None:
        pp, num_chunks = self.shape
        if schedule.pp != pp or schedule.num_ids > num_chunks:
            raise ScheduleError(
                f"the operations are those of {schedule.pp} stages and at least "
                f"{schedule.num_ids} chunks, the bytes those of {pp} and {num_chunks}"
            )


def plan_ledger(plan: Plan) -> tuple[Ledger, ScheduleArrays, IntArray]:
    """Ledger of a plan's chunks, and the schedule and the counts of its streams."""
    schedule, counts = stream_schedule(plan.streams, len(plan.chunks))
    return Ledger(MemoryModel(plan.setup), plan.chunks), schedule, counts


def plan_peaks(plan: Plan) -> tuple[int, ...]:
    """Peak bytes of every stage by the plan's streams."""
    ledger, schedule, counts = plan_ledger(plan)
    return tuple(int(peak) for peak in ledger.peaks(schedule, counts))
