"""One optimizer step, or one evaluation, on one rank: what each instruction of its stream does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.model.context import ChunkContext, Rotary, rank_tokens
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op, Span, Timeline
from ds_infinipipe.planner.plan.transfers import taken_by_peers
from ds_infinipipe.runtime.ranks.clock import Wait, WaitTimes, make_clock
from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.shards.sharding import Sharding
from ds_infinipipe.runtime.stage.batch import StepBatch
from ds_infinipipe.runtime.stage.channels import Channels
from ds_infinipipe.runtime.stage.executor import ChunkInput, StageExecutor

__all__ = ["Attention", "EvaluationRun", "PlanInstruction", "StepParts", "StepRun"]


class PlanInstruction(PipeInstruction):  # type: ignore[misc]
    """An instruction of a plan in DeepSpeed's form, for which `StepRun.do` is the handler."""


@dataclass(frozen=True)
class Attention:
    """How chunks attend on this rank; `kernel` is a name of `ops.attention`."""

    kernel: str
    rotary: Rotary
    sequence_pg: Any
    """The stage's sequence-parallel ranks, None for one."""
    joins_qkv: bool


@dataclass(frozen=True)
class StepParts:
    """What steps work with, the same for all of an engine's.

    `finish` is called with a run whose instructions are all done, to complete the gradients and
    step the optimizer.
    """

    executor: StageExecutor
    channels: Channels
    sharding: Sharding
    waits: WaitTimes
    attention: Attention
    finish: Callable[[StepRun], None]
    hidden_size: int
    is_synchronous: bool = False

    def abandon(self) -> None:
        """Drop the tensors of a step that failed."""
        self.executor.abandon()
        self.channels.abandon()


# a stage's last forward, and the last instruction that makes gradients of weights
_FINAL_AMONG = (frozenset((Op.FORWARD,)), frozenset((Op.BACKWARD, Op.BACKWARD_WEIGHT)))


@dataclass(frozen=True, slots=True)
class _Task:
    """An instruction, and what its place in the stream says of it."""

    action: Callable[[Any, _Task], None]
    """A method of the run, not bound to it: a run is to be freed when its step ends."""
    chunk: int
    instruction: Instruction
    following: int | None
    """The layer that the next compute instruction starts with, which is gathered meanwhile."""
    is_final: bool
    """Whether none like it follows."""


class StepRun:
    """Built from the plan at the start of a step; empty again at its end, or the step fails.

    Iterating yields the stage's instructions as DeepSpeed's pipeline engine takes them.
    """

    def __init__(self, rank: Rank, plan: Plan, batch: StepBatch, parts: StepParts) -> None:
        self.plan = plan
        self.batch = batch
        self.position = -1
        self.entered_s = time.monotonic()
        self.instruction: Instruction | None = None
        self._rank = rank
        self._parts = parts
        self._stream = plan.streams[rank.stage]
        self._tasks = self._make_tasks()
        self._clock = make_clock(rank.device)
        self._marks: list[tuple[Instruction, Any, Any]] = []
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._arenas: dict[int, SequenceArena] = {}
        self._gradients_taken, self._activations_taken = taken_by_peers(plan.streams, rank.stage)

    def __iter__(self) -> Iterator[list[PlanInstruction]]:
        for position, instruction in enumerate(self._stream):
            yield [PlanInstruction(instruction=instruction, position=position)]

    def num_pipe_buffers(self) -> int:
        """None: activations are kept per chunk id, not in DeepSpeed's cyclic buffers."""
        return 0

    def begin(self, label_weight: float) -> None:
        """Forget the last step; `label_weight` is what the summed loss is divided by."""
        parts, execution = self._parts, self.plan.setup.execution
        parts.waits.begin_step()
        parts.sharding.keeps_gathered = execution.keeps_gathered
        parts.executor.begin_step(1.0 / label_weight, execution.loss_block_tokens)

    def do(self, instruction: Instruction, position: int) -> None:
        """Execute the instruction at a position of the stage's stream; each once, in order."""
        self.position, self.instruction = position, instruction
        self.entered_s = time.monotonic()
        task = self._tasks[position]
        task.action(self, task)

    def timeline(self) -> Timeline:
        """What this rank computed when, from the start of its step to now.

        Waits for the device, so it is for the end of the step.
        """
        seconds, stage = self._clock.seconds, self._rank.stage
        spans = tuple(
            Span(stage, instruction.op, instruction.chunk, seconds(start), seconds(end))
            for instruction, start, end in self._marks
        )
        elapsed_s = seconds(self._clock.mark())
        busy_s = sum(span.end_s - span.start_s for span in spans)
        return Timeline(spans, elapsed_s, 1.0 - busy_s / elapsed_s, (busy_s,))

    # ---- the table

    def _make_tasks(self) -> list[_Task]:
        run = type(self)
        actions: dict[Op, Callable[[Any, _Task], None]] = {
            Op.FORWARD: run._forward,
            Op.BACKWARD: run._backward,
            Op.BACKWARD_INPUT: run._backward_input,
            Op.BACKWARD_WEIGHT: run._backward_weight,
            Op.SEND_ACTIVATION: run._send_activation,
            Op.RECV_ACTIVATION: run._receive_activation,
            Op.SEND_GRADIENT: run._send_gradient,
            Op.RECV_GRADIENT: run._receive_gradient,
            Op.STEP: run._step,
        }
        tasks: list[_Task] = []
        following: int | None = None
        later: set[Op] = set()
        for instruction in reversed(self._stream):
            op = instruction.op
            is_final = any(op in kind and later.isdisjoint(kind) for kind in _FINAL_AMONG)
            tasks.append(_Task(actions[op], instruction.chunk, instruction, following, is_final))
            later.add(op)
            entry = self._parts.executor.entry_layer(op)
            following = following if entry is None else entry
        return tasks[::-1]

    def _forward(self, task: _Task) -> None:
        """Roughly: `outputs[chunk] = layers(inputs[chunk])`; the last stage adds to the loss."""
        given = self._chunk_input(task.chunk)
        with self._span(task.instruction):
            output = self._parts.executor.forward(
                task.chunk, given, task.instruction.recompute, task.following, task.is_final
            )
        if output is not None:
            self._outputs[task.chunk] = output

    def _backward(self, task: _Task) -> None:
        """Roughly: `gradients[chunk] = d loss / d inputs[chunk]`."""
        given = self._output_gradient(task.chunk)
        with self._span(task.instruction):
            gradient = self._parts.executor.backward(
                task.chunk, given, task.following, task.is_final
            )
        self._keep_gradient(task.chunk, gradient)

    def _backward_input(self, task: _Task) -> None:
        """Roughly: `gradients[chunk] = d loss / d inputs[chunk]`, weights left for later."""
        given = self._output_gradient(task.chunk)
        with self._span(task.instruction):
            gradient = self._parts.executor.backward_input(task.chunk, given, task.following)
        self._keep_gradient(task.chunk, gradient)

    def _backward_weight(self, task: _Task) -> None:
        """Roughly: `weights.grad += d loss / d weights`, from what the chunk's first half kept."""
        with self._span(task.instruction):
            self._parts.executor.backward_weight(task.chunk, task.is_final)

    def _send_activation(self, task: _Task) -> None:
        """Hand a chunk's output to the next stage; backward does not need it."""
        self._parts.channels.activations_out.send(task.chunk, self._outputs.pop(task.chunk))

    def _receive_activation(self, task: _Task) -> None:
        """Post the receive; `_forward` waits for it."""
        channel = self._parts.channels.activations_in
        channel.post_receive(task.chunk, *self._wire_format(task.chunk))

    def _send_gradient(self, task: _Task) -> None:
        """Hand the gradient of a chunk's input to the previous stage."""
        self._parts.channels.gradients_out.send(task.chunk, self._gradients.pop(task.chunk))

    def _receive_gradient(self, task: _Task) -> None:
        """Post the receive; the chunk's backward, or its first half, waits for it."""
        channel = self._parts.channels.gradients_in
        channel.post_receive(task.chunk, *self._wire_format(task.chunk))

    def _step(self, _: _Task) -> None:
        """The last instruction of a stream: nothing may be left over, then the step ends."""
        self._check_complete()
        with self._parts.waits.during(Wait.TRANSFERS):
            self._parts.channels.drain()
        self._parts.finish(self)

    # ---- chunks

    def _chunk_input(self, chunk: int) -> ChunkInput:
        """Tokens or received activations of a chunk, with its attention geometry."""
        rank, parts, shape = self._rank, self._parts, self.plan.chunks[chunk]
        given = ChunkInput(self._context(chunk))
        if rank.is_first_stage:
            given.ids_T = self.batch.chunk_ids(shape, rank.sp_rank, rank.sp_size).to(rank.device)
        else:
            with parts.waits.during(Wait.TRANSFERS):
                given.hidden_1TE = parts.channels.activations_in.wait(chunk)
                parts.channels.gradients_out.confirm(self._gradients_taken.get(chunk, -1))
        if rank.is_last_stage:
            labels_T = self.batch.chunk_labels(shape, rank.sp_rank, rank.sp_size)
            given.labels_T = labels_T.to(rank.device)
            weights_T = self.batch.chunk_weights(shape, rank.sp_rank, rank.sp_size)
            if weights_T is not None:
                exact = torch.promote_types(rank.dtype, torch.float32)
                given.weights_T = weights_T.to(rank.device, exact)
        return given

    def _context(self, chunk: int) -> ChunkContext:
        rank, shape, attention = self._rank, self.plan.chunks[chunk], self._parts.attention
        arena = None
        if shape.keeps_kv:
            sequence = shape.slices[0].sequence
            if sequence not in self._arenas:
                self._arenas[sequence] = SequenceArena(self.plan.lengths[sequence])
            arena = self._arenas[sequence]
        context = ChunkContext.from_chunk(
            shape,
            arena,
            attention.sequence_pg,
            rotary=attention.rotary,
            device=rank.device,
            dtype=rank.dtype,
            attention_impl=attention.kernel,
            joins_qkv=attention.joins_qkv,
        )
        if rank.sp_size == 1:
            return context
        return replace(context, watch=self._parts.waits.stopwatch(Wait.ALL_TO_ALLS))

    def _output_gradient(self, chunk: int) -> torch.Tensor | None:
        """The received gradient of a chunk's output; None on the last stage, which makes it."""
        if self._rank.is_last_stage:
            return None
        channels = self._parts.channels
        with self._parts.waits.during(Wait.TRANSFERS):
            gradient = channels.gradients_in.wait(chunk)
            channels.activations_out.confirm(self._activations_taken.get(chunk, -1))
        return gradient

    def _wire_format(self, chunk: int) -> tuple[tuple[int, int, int], torch.dtype, torch.device]:
        """Shape `[1, T / sp, E]`, dtype and device of a chunk's activations and gradients."""
        tokens = self.plan.chunks[chunk].padded_tokens // self._rank.sp_size
        return (1, tokens, self._parts.hidden_size), self._rank.dtype, self._rank.device

    @contextmanager
    def _span(self, instruction: Instruction) -> Iterator[None]:
        """Time a compute instruction; waiting for its input is not part of it."""
        start = self._clock.mark()
        yield
        end = self._clock.mark()
        self._marks.append((instruction, start, end))
        if self._parts.is_synchronous:
            self._clock.seconds(end)  # waits for the device

    def _keep_gradient(self, chunk: int, gradient: torch.Tensor | None) -> None:
        """After a chunk's backward: its sequence's arena must be gone with the first slice."""
        shape = self.plan.chunks[chunk]
        if shape.keeps_kv and shape.context_len == 0:
            arena = self._arenas.pop(shape.slices[0].sequence)
            if not arena.is_empty:
                raise ScheduleError(
                    f"the K/V arena of sequence {shape.slices[0].sequence} still holds "
                    f"{arena.live_bytes} bytes after its first slice's backward (chunk {chunk})"
                )
        if gradient is not None and not self._rank.is_first_stage:
            self._gradients[chunk] = gradient

    def _check_complete(self) -> None:
        """Nothing may be left over before the optimizer steps; raises ScheduleError."""
        leftovers = {
            "chunks without backward": self._parts.executor.chunks_in_flight,
            "chunks without gradients of weights": self._parts.executor.chunks_without_weights,
            "outputs not sent": tuple(self._outputs),
            "gradients not sent": tuple(self._gradients),
            "arenas of sequences": tuple(self._arenas),
        }
        found = {what: ids for what, ids in leftovers.items() if ids}
        if found:
            raise ScheduleError(f"the step ends with work left over: {found}")


class EvaluationRun(StepRun):
    """The forward-only streams of a plan; `sequence_losses` are this rank's, by sequence."""

    def __init__(self, rank: Rank, plan: Plan, batch: StepBatch, parts: StepParts) -> None:
        super().__init__(rank, plan, batch, parts)
        self.sequence_losses = torch.zeros(len(plan.lengths), dtype=torch.float64)

    def begin(self, label_weight: float = 1.0) -> None:
        """Gradients stay as they are, and losses are sums."""
        parts, execution = self._parts, self.plan.setup.execution
        parts.waits.begin_step()
        parts.sharding.keeps_gathered = execution.keeps_gathered
        parts.executor.loss_block_tokens = execution.loss_block_tokens

    def end(self) -> None:
        """Nothing may be left over; raises ScheduleError."""
        self._parts.channels.drain()
        self._check_complete()
        self._parts.sharding.release_all()

    def _forward(self, task: _Task) -> None:
        """Roughly: `outputs[chunk] = layers(inputs[chunk])`, or the losses of its sequences."""
        given = self._chunk_input(task.chunk)
        with self._span(task.instruction):
            output = self._parts.executor.evaluate(given)
        shape = self.plan.chunks[task.chunk]
        if shape.keeps_kv and shape.slices[0].is_tail:
            # the tail was the last to read its sequence's arena
            self._arenas.pop(shape.slices[0].sequence).clear()
        if self._rank.is_last_stage:
            self._add_losses(task.chunk, output)
        else:
            self._outputs[task.chunk] = output

    def _add_losses(self, chunk: int, losses_T: torch.Tensor) -> None:
        """Add this rank's token losses of a chunk to `sequence_losses`, by sequence."""
        shape = self.plan.chunks[chunk]
        owners = torch.cat([torch.full((s.length,), s.sequence) for s in shape.slices])
        mine = rank_tokens(shape.padded_tokens, self._rank.sp_size, self._rank.sp_rank)
        owners = owners[mine]  # shorter than the losses where this rank holds padding
        losses = losses_T.detach().to("cpu", torch.float64)[: len(owners)]
        self.sequence_losses.index_add_(0, owners, losses)
