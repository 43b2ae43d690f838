"""The part of the verifier that counts memory: its own walk over the streams.

Only the byte formulas of MemoryModel (per chunk, per layer) are shared with the planner; what is
alive when is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ds_infinipipe.errors import ConfigError, ScheduleError
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.types import Chunk, Op, Plan

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
        if peak.total > plan.memory_limit_bytes:
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
    to the same end.
    """
    memory, tail_start = _memory_model(plan), _tail_starts(plan)
    layers, states = plan.layout.stage_layers[stage], memory.static_bytes[stage]
    activations = kv_arenas = kv_gradients = stashes = 0
    for index, instruction in enumerate(plan.streams[stage]):
        op, recomputed = instruction.op, instruction.recompute
        if op not in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            continue
        chunk = plan.chunks[instruction.chunk]
        head = chunk.slices[0]
        is_first, is_tail = chunk.keeps_kv and head.start == 0, chunk.keeps_kv and head.is_tail
        kept = _kept_bytes(memory, chunk, layers, recomputed)
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
            index, states, activations, kv_arenas, kv_gradients, stashes, transient
        )
        if is_back:
            activations, kv_arenas = activations - kept, kv_arenas - arena
            kv_gradients -= layers * memory.kv_grad_bytes(rows)
        if op is Op.BACKWARD_INPUT:
            stashes += memory.stash_bytes(stage, chunk)
        elif op is Op.BACKWARD_WEIGHT:
            stashes -= memory.stash_bytes(stage, chunk)
        yield during, MemoryUsage(index, states, activations, kv_arenas, kv_gradients, stashes, 0)


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
    return MemoryUsage(0, _memory_model(plan).static_bytes[stage], 0, 0, 0, 0, 0)


def _memory_model(plan: Plan) -> MemoryModel:
    try:
        return MemoryModel(
            plan.model,
            plan.layout,
            zero_stage=plan.zero_stage,
            loss_block_tokens=plan.loss_block_tokens,
            keeps_gathered=plan.keeps_gathered,
        )
    except ConfigError as error:
        raise ScheduleError(f"the plan's memory cannot be counted: {error}") from error


def _tail_starts(plan: Plan) -> Mapping[int, int]:
    return {
        chunk.slices[0].sequence: chunk.slices[0].start
        for chunk in plan.chunks
        if chunk.keeps_kv and chunk.slices[0].is_tail
    }


def _kept_bytes(memory: MemoryModel, chunk: Chunk, layers: int, recomputed: int) -> int:
    saved = (layers - recomputed) * memory.saved_bytes(chunk)
    return saved + recomputed * memory.input_bytes(chunk) + memory.output_bytes(chunk)


def _fail_over_limit(plan: Plan, stage: int, peak: MemoryUsage) -> NoReturn:
    parts = ", ".join(
        f"{name.replace('_', ' ')} {getattr(peak, name) / _GIB:.2f}"
        for name in ("states", "activations", "kv_arenas", "kv_gradients", "stashes", "transient")
    )
    raise ScheduleError(
        f"stage {stage} needs {peak.total / _GIB:.2f} GiB at instruction {peak.instruction} "
        f"({plan.streams[stage][peak.instruction]}), the limit is "
        f"{plan.memory_limit_bytes / _GIB:.2f} GiB (in GiB: {parts}): use more "
        "slices, recompute more layers or raise the limit"
    )
