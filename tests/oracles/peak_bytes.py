"""Peak of one stage, operation by operation: what `Ledger.peaks` does for all stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.planner.predict.memory import MemoryModel

__all__ = ["RecomputeCounts", "peak_bytes"]

RecomputeCounts = Mapping[int, int] | Sequence[int] | NDArray[np.int64]
"""Recomputed layers by chunk id."""


def peak_bytes(
    memory: MemoryModel,
    stage: int,
    operations: Sequence[tuple[Op, int]],
    chunks: Sequence[Chunk],
    recompute: RecomputeCounts,
    transfers: Sequence[int] | None = None,
) -> int:
    """Peak of a stage that runs these operations in order, static bytes included (Eq. 8).

    `recompute[chunk id]` layers of the stage are recomputed; `transfers` are the bytes beside
    each operation, a row of `transfer_bytes`, none without. Depends on the orders only.
    """
    layers = memory.layout.stage_layers[stage]
    tails = {
        c.slices[0].sequence: c.slices[0] for c in chunks if c.keeps_kv and c.slices[0].is_tail
    }
    current = peak = 0
    between = [0] * len(operations) if transfers is None else transfers
    for (op, chunk_id), moving in zip(operations, between, strict=True):
        chunk, count = chunks[chunk_id], int(recompute[chunk_id])
        is_first = chunk.keeps_kv and chunk.context_len == 0
        if op is Op.FORWARD:
            if is_first:
                current += layers * memory.arena_bytes(tails[chunk.slices[0].sequence].end)
            current += memory.held_bytes(stage, chunk, count)
            peak = max(peak, current + moving + memory.forward_transient(stage, chunk, count))
        elif op is Op.BACKWARD_WEIGHT:
            peak = max(peak, current + moving + memory.weight_transient(stage, chunk))
            current -= memory.stash_bytes(stage, chunk)
        elif op.makes_gradient:
            if chunk.keeps_kv and chunk.slices[0].is_tail:
                current += layers * memory.kv_grad_bytes(chunk.context_len)
            closed = 0
            if is_first:
                tail = tails[chunk.slices[0].sequence]
                closed = memory.arena_bytes(tail.end) + memory.kv_grad_bytes(tail.start)
            is_whole = op is Op.BACKWARD
            if is_whole:
                transient = memory.backward_transient(stage, chunk, count)
            else:
                transient = memory.input_transient(stage, chunk, count, closed)
            peak = max(peak, current + moving + transient)
            current -= memory.held_bytes(stage, chunk, count) + layers * closed
            current += 0 if is_whole else memory.stash_bytes(stage, chunk)
    return memory.static_bytes[stage] + peak
