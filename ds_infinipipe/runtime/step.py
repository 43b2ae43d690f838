"""State of one optimizer step on one rank: the plan, the batch, arenas, and what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.model.context import ChunkContext, rank_tokens
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.transfers import taken_by_peers
from ds_infinipipe.planner.types import Instruction, Op, Plan, Span, Timeline
from ds_infinipipe.runtime.batch import StepBatch
from ds_infinipipe.runtime.clock import make_clock
from ds_infinipipe.runtime.executor import ChunkInput
from ds_infinipipe.runtime.waits import Wait

if TYPE_CHECKING:
    from ds_infinipipe.runtime.engine import InfiniPipeEngine

__all__ = ["StepState"]


class StepState:
    """Built from the plan at the start of a step; empty again at its end, or the step fails."""

    def __init__(self, engine: InfiniPipeEngine, plan: Plan, batch: StepBatch) -> None:
        self._engine = engine
        self.plan = plan
        self.batch = batch
        self.outputs: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self._clock = make_clock(engine.device)
        self._marks: list[tuple[Instruction, Any, Any]] = []
        self.sequence_losses = torch.zeros(len(plan.lengths), dtype=torch.float64)
        self.position = -1
        self.entered_s = time.monotonic()
        self.instruction: Instruction | None = None
        self.is_committed = False  # all ranks have agreed what to do with the gradients
        self._arenas: dict[int, SequenceArena] = {}
        stream = plan.streams[engine.stage_id]
        self._final_positions = {
            max((p for p, i in enumerate(stream) if i.op in ops), default=-1)
            for ops in ((Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_WEIGHT))
        }
        self._gradients_taken, self._activations_taken = taken_by_peers(
            plan.streams, engine.stage_id
        )

    def chunk_input(self, chunk: int) -> ChunkInput:
        """Tokens or received activations of a chunk, with its attention geometry."""
        engine, shape = self._engine, self.plan.chunks[chunk]
        sp_rank, sp_size = engine.sp_rank, engine.sp_size
        given = ChunkInput(self._context(chunk))
        if engine.is_first_stage():
            given.ids_T = self.batch.chunk_ids(shape, sp_rank, sp_size).to(engine.device)
        else:
            with engine.waits.during(Wait.TRANSFERS):
                given.hidden_1TE = engine.channels.activations_in.wait(chunk)
                engine.channels.gradients_out.confirm(self._gradients_taken.get(chunk, -1))
        if engine.is_last_stage():
            given.labels_T = self.batch.chunk_labels(shape, sp_rank, sp_size).to(engine.device)
            weights_T = self.batch.chunk_weights(shape, sp_rank, sp_size)
            if weights_T is not None:
                exact = torch.promote_types(engine.module.dtype, torch.float32)
                given.weights_T = weights_T.to(engine.device, exact)
        return given

    def is_final(self, position: int) -> bool:
        """True for the stage's last forward, and for what makes its last weight gradients."""
        return position in self._final_positions

    def output_gradient(self, chunk: int) -> torch.Tensor | None:
        """The received gradient of a chunk's output; None on the last stage, which makes it."""
        engine = self._engine
        if engine.is_last_stage():
            return None
        with engine.waits.during(Wait.TRANSFERS):
            gradient = engine.channels.gradients_in.wait(chunk)
            engine.channels.activations_out.confirm(self._activations_taken.get(chunk, -1))
        return gradient

    def wire_format(self, chunk: int) -> tuple[tuple[int, int, int], torch.dtype, torch.device]:
        """Shape `[1, T / sp, E]`, dtype and device of a chunk's activations and gradients."""
        engine = self._engine
        tokens = self.plan.chunks[chunk].padded_tokens // engine.sp_size
        return (1, tokens, engine.module.spec.hidden_size), engine.module.dtype, engine.device

    @contextmanager
    def span(self, instruction: Instruction) -> Iterator[None]:
        """Time a compute instruction; waiting for its input is not part of it."""
        start = self._clock.mark()
        yield
        end = self._clock.mark()
        self._marks.append((instruction, start, end))
        if self._engine.settings.debug.synchronous:
            self._clock.seconds(end)  # waits for the device

    def finish_chunk(self, chunk: int) -> None:
        """After a chunk's backward: its sequence's arena must be gone with the first slice."""
        shape = self.plan.chunks[chunk]
        if shape.keeps_kv and shape.context_len == 0:
            arena = self._arenas.pop(shape.slices[0].sequence)
            if not arena.is_empty:
                raise ScheduleError(
                    f"the K/V arena of sequence {shape.slices[0].sequence} still holds "
                    f"{arena.live_bytes} bytes after its first slice's backward (chunk {chunk})"
                )

    def add_losses(self, chunk: int, losses_T: torch.Tensor) -> None:
        """Add this rank's token losses of a chunk to `sequence_losses`, by sequence."""
        shape, engine = self.plan.chunks[chunk], self._engine
        owners = torch.cat([torch.full((s.length,), s.sequence) for s in shape.slices])
        mine = rank_tokens(shape.padded_tokens, engine.sp_size, engine.sp_rank)
        owners = owners[mine]  # shorter than the losses where this rank holds padding
        losses = losses_T.detach().to("cpu", torch.float64)[: len(owners)]
        self.sequence_losses.index_add_(0, owners, losses)

    def clear_arena(self, chunk: int) -> None:
        """After a chunk's evaluation: the tail was the last to read its sequence's arena."""
        shape = self.plan.chunks[chunk]
        if shape.keeps_kv and shape.slices[0].is_tail:
            self._arenas.pop(shape.slices[0].sequence).clear()

    def check_complete(self) -> None:
        """Nothing may be left over before the optimizer steps; raises ScheduleError."""
        leftovers = {
            "chunks without backward": self._engine.executor.chunks_in_flight,
            "chunks without gradients of weights": self._engine.executor.chunks_without_weights,
            "outputs not sent": tuple(self.outputs),
            "gradients not sent": tuple(self.gradients),
            "arenas of sequences": tuple(self._arenas),
        }
        found = {what: ids for what, ids in leftovers.items() if ids}
        if found:
            raise ScheduleError(f"the step ends with work left over: {found}")

    def timeline(self) -> Timeline:
        """What this rank computed when, from the start of its step to now.

        Waits for the device, so it is for the end of the step.
        """
        seconds, stage = self._clock.seconds, self._engine.stage_id
        spans = tuple(
            Span(stage, instruction.op, instruction.chunk, seconds(start), seconds(end))
            for instruction, start, end in self._marks
        )
        elapsed_s = seconds(self._clock.mark())
        busy_s = sum(span.end_s - span.start_s for span in spans)
        return Timeline(spans, elapsed_s, 1.0 - busy_s / elapsed_s, (busy_s,))

    def _context(self, chunk: int) -> ChunkContext:
        engine, shape = self._engine, self.plan.chunks[chunk]
        arena = None
        if shape.keeps_kv:
            sequence = shape.slices[0].sequence
            if sequence not in self._arenas:
                self._arenas[sequence] = SequenceArena(self.plan.lengths[sequence])
            arena = self._arenas[sequence]
        return ChunkContext.from_chunk(
            shape,
            arena,
            engine.sequence_pg,
            rotary=engine.rotary,
            device=engine.device,
            dtype=engine.module.dtype,
            attention_impl=engine.attention_impl,
            joins_qkv=engine.settings.runtime.all_to_all == "fused",
            watch=engine.waits.stopwatch(Wait.ALL_TO_ALLS) if engine.sp_size > 1 else None,
        )
