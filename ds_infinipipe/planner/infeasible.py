"""Says what does not fit, by how much, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_infinipipe.errors import InfeasiblePlanError
from ds_infinipipe.planner.candidates import Chunking
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.settings import PlannerSettings

__all__ = ["check_states", "infeasible_plan"]

_GIB = 2**30


@dataclass(frozen=True)
class _Misfit:
    """The block of chunks that exceeds the limit most when it has a pipeline of its own."""

    chunking: Chunking
    block: tuple[int, ...]
    stage: int
    peak_bytes: int


def check_states(memory: MemoryModel, limit_bytes: int) -> None:
    """Raise InfeasiblePlanError where a stage has no room for activations at all."""
    stage = int(np.argmax(memory.static_bytes))
    need = memory.static_bytes[stage]
    if need >= limit_bytes:
        layout = memory.layout
        raise InfeasiblePlanError(
            f"stage {stage} needs {_size(need)} for the parameters, gradients and optimizer states "
            f"of its {layout.stage_layers[stage]} layers of {memory.model.name} alone, the limit "
            f"is {_size(limit_bytes)}: use more stages (pp is {layout.pp}), more ranks per stage "
            f"(sp is {layout.sp}) or a larger memory limit"
        )


def infeasible_plan(
    chunkings: Sequence[Chunking], lengths: Sequence[int], settings: PlannerSettings
) -> InfeasiblePlanError:
    """The error for a batch none of whose chunkings fits, named by the one that comes closest."""
    misfit = min((_worst(chunking) for chunking in chunkings), key=lambda m: m.peak_bytes)
    chunking, layout = misfit.chunking, misfit.chunking.memory.layout
    layers = layout.stage_layers[misfit.stage]
    how = "none of its" if settings.recompute == "none" else f"all {layers}"
    recompute = "recompute 'adaptive', " if settings.recompute == "none" else ""
    # more slices shrink transients but add K/V gradients: only worth saying while they still help
    is_finest = chunking.k == max(c.k for c in chunkings)
    slices = f"more slices (max_slices above {chunking.k}), " if is_finest else ""
    return InfeasiblePlanError(
        f"{_name(misfit, lengths)} needs {_size(misfit.peak_bytes)} on stage {misfit.stage} with "
        f"{how} layers recomputed, the limit is {_size(chunking.limit_bytes)}: use {recompute}"
        f"{slices}a larger memory limit, more ranks per stage (sp is {layout.sp}) or more stages "
        f"(pp is {layout.pp})"
    )


def _worst(chunking: Chunking) -> _Misfit:
    layout = chunking.memory.layout
    layers = 0 if chunking.settings.recompute == "none" else max(layout.stage_layers)
    worst = _Misfit(chunking, (), 0, 0)
    for block in chunking.blocks():
        counts = np.minimum(layers, np.array(layout.stage_layers))[:, None]
        peaks = chunking.pipeline(block).peaks(np.broadcast_to(counts, (layout.pp, len(block))))
        if peaks.max() > worst.peak_bytes:
            worst = _Misfit(chunking, block, int(peaks.argmax()), int(peaks.max()))
    return worst


def _name(misfit: _Misfit, lengths: Sequence[int]) -> str:
    chunks = [misfit.chunking.chunks[c] for c in misfit.block]
    first = chunks[0].slices[0]
    length = lengths[first.sequence]
    if chunks[0].keeps_kv:
        return f"sequence {first.sequence} of {length} tokens, cut into {len(chunks)} slices,"
    if len(chunks[0].slices) == 1:
        return f"sequence {first.sequence} of {length} tokens, in one chunk,"
    return (
        f"a chunk of {chunks[0].tokens} tokens (sequence {first.sequence} of {length} tokens and "
        f"{len(chunks[0].slices) - 1} more)"
    )


def _size(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.3f} MiB"
