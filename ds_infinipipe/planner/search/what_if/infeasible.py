"""Says what does not fit, by how much, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ds_infinipipe.errors import InfeasiblePlanError
from ds_infinipipe.planner.search.paper.chunkings import Chunking
from ds_infinipipe.planner.search.what_if.capacity import (
    Misfit,
    Question,
    closest_misfit,
    largest_context,
    sufficient_limit,
)

__all__ = ["check_states", "infeasible_plan"]

_GIB = 2**30


def check_states(question: Question, lengths: Sequence[int]) -> None:
    """Raise InfeasiblePlanError where a stage has no room for activations at all."""
    memory = question.memory
    stage = int(np.argmax(memory.static_bytes))
    need, limit_bytes = memory.static_bytes[stage], question.setup.limit_bytes
    if need < limit_bytes:
        return
    layout = memory.layout
    misfit = closest_misfit(question.within(need).chunkings(lengths, question.coarse_ks))
    raise InfeasiblePlanError(
        f"stage {stage} needs {_size(need)} for the parameters, gradients and optimizer states "
        f"of its {layout.stage_layers[stage]} layers of {memory.model.name} alone, the limit "
        f"is {_size(limit_bytes)}: use more stages (pp is {layout.pp}), more ranks per stage "
        f"(sp is {layout.sp}) or a larger memory limit. No context fits at these settings; "
        f"{_name(misfit, lengths)} needs {_size(misfit.peak_bytes)} on stage {misfit.stage} with "
        f"{_how(misfit)} layers recomputed{_enough(question, lengths, misfit)}"
    )


def infeasible_plan(
    question: Question, chunkings: Sequence[Chunking], lengths: Sequence[int]
) -> InfeasiblePlanError:
    """The error for a batch none of whose chunkings fits, named by the one that comes closest.

    It also says which sequence length and which limit would do; finding them takes a second at
    most. The length assumes that a shorter sequence fits wherever a longer one does.
    """
    misfit = closest_misfit(chunkings)
    chunking, layout = misfit.chunking, misfit.chunking.memory.layout
    recompute = "recompute 'adaptive', " if question.settings.recompute == "none" else ""
    # more slices shrink transients but add K/V gradients: only worth saying while they still help
    is_finest = chunking.k == max(c.k for c in chunkings)
    slices = f"more slices (max_slices above {chunking.k}), " if is_finest else ""
    return InfeasiblePlanError(
        f"{_name(misfit, lengths)} needs {_size(misfit.peak_bytes)} on stage {misfit.stage} with "
        f"{_how(misfit)} layers recomputed, the limit is {_size(chunking.limit_bytes)}: use "
        f"{recompute}{slices}a larger memory limit, more ranks per stage (sp is {layout.sp}) or "
        f"more stages (pp is {layout.pp}). {_context(question, lengths)}"
        f"{_enough(question, lengths, misfit)}"
    )


def _how(misfit: Misfit) -> str:
    layers = misfit.chunking.memory.layout.stage_layers[misfit.stage]
    return "none of its" if misfit.chunking.settings.recompute == "none" else f"all {layers}"


def _context(question: Question, lengths: Sequence[int]) -> str:
    context = largest_context(question, max(lengths))
    if not context.value:
        return "No context fits at these settings"
    at_least = "" if context.is_exact else "at least "
    packing = ""
    if context.value >= max(lengths):
        packing = ", so it is what is packed beside a sequence that does not fit"
    return (
        f"The largest context that fits at these settings, planned alone, is {at_least}"
        f"{context.value} tokens{packing}"
    )


def _enough(question: Question, lengths: Sequence[int], misfit: Misfit) -> str:
    limit_bytes = sufficient_limit(question, lengths, misfit)
    if limit_bytes is None:
        return ""
    return f"; a limit of {_size(limit_bytes, is_up=True)} is enough for this batch"


def _name(misfit: Misfit, lengths: Sequence[int]) -> str:
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


def _size(num_bytes: int, is_up: bool = False) -> str:
    """Text; with `is_up` never less than the bytes, so that it can be used as a limit."""
    unit, name, digits = (_GIB, "GiB", 2) if num_bytes >= _GIB // 100 else (2**20, "MiB", 4)
    value = num_bytes / unit
    if is_up:
        value = math.ceil(value * 10**digits) / 10**digits
    return f"{value:.{digits}f} {name}"
