"""The part of the verifier that counts memory: its own walk over the streams.

Only the byte formulas of MemoryModel (per chunk, per layer) are shared with the planner; what is
alive when is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from ds_infinipipe.errors import ConfigError, ScheduleError
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.types import Chunk, Op, Plan

__all__ = ["check_memory", "peak_bytes_by_stage"]

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Usage:
    """What is alive on one rank of a stage while one instruction runs, bytes."""

    instruction: int
    states: int
    activations: int
    kv_arenas: int
    kv_gradients: int
    transient: int

    @property
    def total(self) -> int:
        return self.states + self.activations + self.kv_arenas + self.kv_gradients + self.transient


def peak_bytes_by_stage(plan: Plan) -> tuple[int, ...]:
    """Peak bytes on a rank of each stage, counted from the streams (Eq. 8 on what is alive)."""
    return tuple(usage.total for usage in _peaks(plan))


def check_memory(plan: Plan) -> None:
    """Raise ScheduleError unless every peak is within the limit and as predicted."""
    for stage, (peak, predicted) in enumerate(
        zip(_peaks(plan), plan.predicted.peak_bytes, strict=True)
    ):
        if peak.total > plan.memory_limit_bytes:
            _fail_over_limit(plan, stage, peak)
        if peak.total != predicted:
            raise ScheduleError(
                f"stage {stage}: the plan predicts a peak of {predicted} bytes, but its stream "
                f"needs {peak.total} (at instruction {peak.instruction}, "
                f"{plan.streams[stage][peak.instruction]})"
            )


def _peaks(plan: Plan) -> list[_Usage]:
    try:
        memory = MemoryModel(
            plan.model,
            plan.layout,
            zero_stage=plan.zero_stage,
            loss_block_tokens=plan.loss_block_tokens,
        )
    except ConfigError as error:
        raise ScheduleError(f"the plan's memory cannot be counted: {error}") from error
    tail_start = {
        chunk.slices[0].sequence: chunk.slices[0].start
        for chunk in plan.chunks
        if chunk.keeps_kv and chunk.slices[0].is_tail
    }
    return [_peak(plan, memory, stage, tail_start) for stage in range(plan.layout.pp)]


def _peak(plan: Plan, memory: MemoryModel, stage: int, tail_start: Mapping[int, int]) -> _Usage:
    """The first instruction of the stage at which most bytes are alive.

    What a chunk keeps lives from its F to its B, both included. The arena of a cut sequence lives
    from the F of its first slice to the end of that slice's B; its dK and dV, as many rows as come
    before the tail, from the B of the tail to the same end.
    """
    layers, states = plan.layout.stage_layers[stage], memory.static_bytes[stage]
    activations = kv_arenas = kv_gradients = 0
    peak = _Usage(0, states, 0, 0, 0, 0)
    for index, instruction in enumerate(plan.streams[stage]):
        if instruction.op not in (Op.FORWARD, Op.BACKWARD):
            continue
        chunk, recomputed = plan.chunks[instruction.chunk], instruction.recompute
        head = chunk.slices[0]
        is_first, is_tail = chunk.keeps_kv and head.start == 0, chunk.keeps_kv and head.is_tail
        is_forward = instruction.op is Op.FORWARD
        if is_forward:
            activations += _kept_bytes(memory, chunk, layers, recomputed)
            kv_arenas += layers * memory.arena_bytes(plan.lengths[head.sequence]) if is_first else 0
            transient = memory.forward_transient(stage, chunk, recomputed)
        else:
            kv_gradients += layers * memory.kv_grad_bytes(head.start) if is_tail else 0
            transient = memory.backward_transient(stage, chunk, recomputed)
        usage = _Usage(index, states, activations, kv_arenas, kv_gradients, transient)
        peak = usage if usage.total > peak.total else peak
        if not is_forward:
            activations -= _kept_bytes(memory, chunk, layers, recomputed)
            if is_first:
                kv_arenas -= layers * memory.arena_bytes(plan.lengths[head.sequence])
                kv_gradients -= layers * memory.kv_grad_bytes(tail_start[head.sequence])
    return peak


def _kept_bytes(memory: MemoryModel, chunk: Chunk, layers: int, recomputed: int) -> int:
    saved = (layers - recomputed) * memory.saved_bytes(chunk)
    return saved + recomputed * memory.input_bytes(chunk) + memory.output_bytes(chunk)


def _fail_over_limit(plan: Plan, stage: int, peak: _Usage) -> NoReturn:
    parts = ", ".join(
        f"{name.replace('_', ' ')} {getattr(peak, name) / _GIB:.2f}"
        for name in ("states", "activations", "kv_arenas", "kv_gradients", "transient")
    )
    raise ScheduleError(
        f"stage {stage} needs {peak.total / _GIB:.2f} GiB at instruction {peak.instruction} "
        f"({plan.streams[stage][peak.instruction]}), the limit is "
        f"{plan.memory_limit_bytes / _GIB:.2f} GiB (in GiB: {parts}): use more "
        "slices, recompute more layers or raise the limit"
    )
