"""The part of the verifier that counts memory: its own walk over the streams.

Only the byte formulas of MemoryModel (per chunk, per layer) are shared with the planner; what is
alive when is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.planner.plan.transfers import taken_by_peers
from ds_infinipipe.planner.predict.memory import MemoryModel

__all__ = ["MemoryUsage", "check_memory", "memory_usage", "peak_bytes_by_stage", "peak_usages"]

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """What is alive on one rank of a stage while a compute instruction runs, or after it, bytes.

    `instruction` is its place in the stage's stream, `stashes` is what W's to come need.
    """

    instruction: int
    states: int
    activations: int
    kv_arenas: int
    kv_gradients: int
    stashes: int
    transient: int

    @property
    def total(self) -> int:
        alive = self.states + self.activations + self.kv_arenas + self.kv_gradients
        return alive + self.stashes + self.transient


def peak_bytes_by_stage(plan: Plan) -> tuple[int, ...]:
    """Peak bytes on a rank of each stage, counted from the streams (Eq. 8 on what is alive)."""
    return tuple(usage.total for usage in peak_usages(plan))


def peak_usages(plan: Plan) -> tuple[MemoryUsage, ...]:
    """By stage, the first instruction at which most bytes are alive."""
    # max() keeps the first of equals
    return tuple(
        max(
            (during for during, _ in memory_usage(plan, stage)),
            key=lambda usage: usage.total,
            default=_idle(plan, stage),
        )
        for stage in range(plan.layout.pp)
    )


def check_memory(plan: Plan) -> None:
    """Raise ScheduleError unless every peak is within the limit and as predicted."""
    for stage, (peak, predicted) in enumerate(
        zip(peak_usages(plan), plan.predicted.peak_bytes, strict=True)
    ):
        if peak.total > plan.setup.limit_bytes:
            _fail_over_limit(plan, stage, peak)
        if peak.total != predicted:
            raise ScheduleError(
                f"stage {stage}: the plan predicts a peak of {predicted} bytes, but its stream "
                f"needs {peak.total} (at instruction {peak.instruction}, "
                f"{plan.streams[stage][peak.instruction]})"
            )


def memory_usage(plan: Plan, stage: int) -> Iterator[tuple[MemoryUsage, MemoryUsage]]:
    """What is alive during and after each F, B, I and W of the stage, in the order of its stream.

    What a chunk keeps lives from its F to its B or I, both included; what I stashes from its end to
    that of W. The arena of a cut sequence lives from the F of its first slice to the end of that
    slice's B or I; its dK and dV, as many rows as come before the tail, from the B or I of the tail
    to the same end. Activations include what is in transfer: a receive from where it is posted,
    what is sent until its peer is known to have it.
    """
    memory, tail_start = MemoryModel(plan.setup), _tail_starts(plan)
    layers, states = plan.layout.stage_layers[stage], memory.static_bytes[stage]
    activations = kv_arenas = kv_gradients = stashes = 0
    transfers = _Transfers(plan, stage, memory)
    for index, instruction in enumerate(plan.streams[stage]):
        op, recomputed = instruction.op, instruction.recompute
        if not op.is_compute:
            transfers.note(instruction)
            continue
        moving = transfers.enter(instruction)
        chunk = plan.chunks[instruction.chunk]
        head = chunk.slices[0]
        is_first, is_tail = chunk.keeps_kv and head.start == 0, chunk.keeps_kv and head.is_tail
        kept = _kept_bytes(memory, stage, chunk, recomputed)
        arena = layers * memory.arena_bytes(plan.lengths[head.sequence]) if is_first else 0
        is_back = op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        if op is Op.FORWARD:
            activations += kept
            kv_arenas += arena
        elif is_back:
            kv_gradients += layers * memory.kv_grad_bytes(head.start) if is_tail else 0
        rows = tail_start[head.sequence] if is_first else 0
        closed = arena // layers + memory.kv_grad_bytes(rows)
        transient = _transient(memory, stage, op, chunk, recomputed, closed)
        during = MemoryUsage(
            index, states, activations + moving, kv_arenas, kv_gradients, stashes, transient
        )
        if is_back:
            activations, kv_arenas = activations - kept, kv_arenas - arena
            kv_gradients -= layers * memory.kv_grad_bytes(rows)
        if op is Op.BACKWARD_INPUT:
            stashes += memory.stash_bytes(stage, chunk)
        elif op is Op.BACKWARD_WEIGHT:
            stashes -= memory.stash_bytes(stage, chunk)
        after = activations + transfers.leave(instruction)
        yield during, MemoryUsage(index, states, after, kv_arenas, kv_gradients, stashes, 0)


class _Transfers:
    """The bytes of a stage's transfers, as its stream is walked."""

    def __init__(self, plan: Plan, stage: int, memory: MemoryModel) -> None:
        self._gradients_taken, self._activations_taken = taken_by_peers(plan.streams, stage)
        self._sizes = [memory.input_bytes(chunk) for chunk in plan.chunks]
        self._sends = stage + 1 < plan.layout.pp
        self._posted: set[tuple[bool, int]] = set()  # is an activation, chunk
        self._outputs: list[int] = []
        self._gradients: list[int] = []

    def note(self, instruction: Instruction) -> None:
        """A receive or a send."""
        op, chunk = instruction.op, instruction.chunk
        if op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT):
            self._posted.add((op is Op.RECV_ACTIVATION, chunk))
        elif op is Op.SEND_GRADIENT:
            self._gradients.append(chunk)

    def enter(self, instruction: Instruction) -> int:
        """Bytes while a compute instruction runs, which may wait for a receive first."""
        op, chunk = instruction.op, instruction.chunk
        received = 0
        if op is Op.FORWARD:
            self._posted.discard((True, chunk))
            self._gradients = _untaken(self._gradients, self._gradients_taken.get(chunk, -1))
            self._outputs += [chunk] if self._sends else []
        elif op.makes_gradient:
            received = self._sizes[chunk] if (False, chunk) in self._posted else 0
            self._posted.discard((False, chunk))
            self._outputs = _untaken(self._outputs, self._activations_taken.get(chunk, -1))
        return received + self._total()

    def leave(self, instruction: Instruction) -> int:
        """Bytes once a compute instruction is over and its result on its way."""
        is_sent = instruction.op.makes_gradient and bool(self._gradients_taken)
        return self._total() + (self._sizes[instruction.chunk] if is_sent else 0)

    def _total(self) -> int:
        moving = [*self._outputs, *self._gradients, *(chunk for _, chunk in self._posted)]
        return sum(self._sizes[chunk] for chunk in moving)


def _untaken(sent: list[int], taken: int) -> list[int]:
    """What comes after the last chunk known to be taken, -1 for none."""
    return sent[sent.index(taken) + 1 :] if taken in sent else sent


def _transient(
    memory: MemoryModel, stage: int, op: Op, chunk: Chunk, recomputed: int, closed: int
) -> int:
    """`closed` is what a first slice's backward frees in each layer."""
    if op is Op.FORWARD:
        return memory.forward_transient(stage, chunk, recomputed)
    if op is Op.BACKWARD:
        return memory.backward_transient(stage, chunk, recomputed)
    if op is Op.BACKWARD_INPUT:
        return memory.input_transient(stage, chunk, recomputed, closed)
    return memory.weight_transient(stage, chunk)


def _idle(plan: Plan, stage: int) -> MemoryUsage:
    return MemoryUsage(0, MemoryModel(plan.setup).static_bytes[stage], 0, 0, 0, 0, 0)


def _tail_starts(plan: Plan) -> Mapping[int, int]:
    return {
        chunk.slices[0].sequence: chunk.slices[0].start
        for chunk in plan.chunks
        if chunk.keeps_kv and chunk.slices[0].is_tail
    }


def _kept_bytes(memory: MemoryModel, stage: int, chunk: Chunk, recomputed: int) -> int:
    saved = (memory.layout.stage_layers[stage] - recomputed) * memory.saved_bytes(chunk)
    return saved + recomputed * memory.input_bytes(chunk) + memory.output_bytes(stage, chunk)


def _fail_over_limit(plan: Plan, stage: int, peak: MemoryUsage) -> NoReturn:
    parts = ", ".join(
        f"{name.replace('_', ' ')} {getattr(peak, name) / _GIB:.2f}"
        for name in ("states", "activations", "kv_arenas", "kv_gradients", "stashes", "transient")
    )
    raise ScheduleError(
        f"stage {stage} needs {peak.total / _GIB:.2f} GiB at instruction {peak.instruction} "
        f"({plan.streams[stage][peak.instruction]}), the limit is "
        f"{plan.setup.limit_bytes / _GIB:.2f} GiB (in GiB: {parts}): use more "
        "slices, recompute more layers or raise the limit"
    )
