"""Seq1F1B: 1F1B over chunks of one fixed size, the same checkpointing for all of them.

As the paper compares it (V-A): sequences are split and packed into fixed-sized chunks. The order
and window are our own (longest first, Eq. 7), which flatter it; the sizes of slices, the packing
and the checkpointing are static. Not coarse: order, streams, simulator and memory scan are those
of our plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ds_infinipipe.baselines.packing import fixed_chunks
from ds_infinipipe.baselines.pipeline import Chunker, run_pipeline
from ds_infinipipe.baselines.result import (
    PAPER,
    TUNED,
    BaselineResult,
    Workload,
    fastest,
    infeasible,
)

__all__ = ["chunk_sizes_to_try", "fixed_size_chunker", "seq1f1b"]

NAME = "Seq1F1B"
_REFERENCE_CONTEXT = 96 * 1024
_SIZES = tuple(1024 * k for k in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192))
_PAPER_SIZES = tuple(1024 * k for k in (4, 8, 16, 32, 64))
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)


def seq1f1b(workload: Workload) -> tuple[BaselineResult, ...]:
    """The paper's configuration, then tuned.

    Paper: chunk size and checkpointing are those that are best when the longest sequence has 96K
    tokens or more ("optimized for a 96K context length"). Tuned: both are best for the batch.
    """
    return (_paper(workload), _tuned(workload))


def _paper(workload: Workload) -> BaselineResult:
    lengths = list(workload.lengths)
    lengths[lengths.index(workload.longest)] = max(_REFERENCE_CONTEXT, workload.longest)
    reference = _best(replace(workload, lengths=tuple(lengths)), _PAPER_SIZES)
    if reference is None:
        return infeasible(NAME, PAPER, "no chunk size of 4K to 64K fits a sequence of 96K tokens")
    size, layers = reference
    return _run(workload, PAPER, size, layers)


def _best(workload: Workload, sizes: Sequence[int]) -> tuple[int, int] | None:
    """(chunk size, recomputed layers) of the fastest."""
    best: tuple[float, int, int] | None = None
    for size in sizes:
        for layers in range(max(workload.setup.layout.stage_layers) + 1):
            result = _run(workload, PAPER, size, layers)
            if result.feasible:
                found = (result.step_time_s, size, layers)
                best = found if best is None else min(best, found)
                break
    return None if best is None else best[1:]


def _tuned(workload: Workload) -> BaselineResult:
    results: list[BaselineResult] = []
    below_s = math.inf
    for variant in workload.variants:
        for size in chunk_sizes_to_try(workload):
            results.append(_run(variant, TUNED, size, None, below_s))
            if results[-1].feasible:
                below_s = min(below_s, results[-1].step_time_s)
    return fastest(results)


def chunk_sizes_to_try(workload: Workload) -> tuple[int, ...]:
    """Parts of the longest sequence and round sizes below it."""
    parts = {math.ceil(workload.longest / part) for part in _PARTS}
    return tuple(sorted(parts | {size for size in _SIZES if size < workload.longest}, reverse=True))


def _run(
    workload: Workload,
    configuration: str,
    size: int,
    layers: int | None,
    below_s: float = math.inf,
) -> BaselineResult:
    return run_pipeline(
        NAME,
        configuration,
        workload,
        fixed_size_chunker(workload, size),
        f"chunks of {size:,}",
        recompute=layers,
        below_s=below_s,
    )


def fixed_size_chunker(workload: Workload, size: int) -> Chunker:
    sp, unit = workload.setup.layout.sp, workload.setup.unit
    rounded = -(-size // unit) * unit
    return lambda lengths: fixed_chunks(lengths, rounded, unit, sp)
