"""DAPPLE, plain 1F1B: whole sequences packed into micro-batches, nothing is cut.

A micro-batch holds at least the longest sequence, so all are large. Order, streams, simulator and
memory scan are those of our plans; packing is best-fit decreasing, and checkpointing the fewest
layers, equal for all micro-batches and stages, that fit. The paper does not run it; its "paper"
configuration is the usual one, micro-batches of the longest sequence.
"""

from __future__ import annotations

import math

from ds_infinipipe.baselines.pipeline import run_pipeline
from ds_infinipipe.baselines.result import PAPER, TUNED, BaselineResult, Workload, fastest
from ds_infinipipe.baselines.seq1f1b import fixed_size_chunker

__all__ = ["CAPACITY_FACTORS", "dapple"]

NAME = "DAPPLE (1F1B)"
CAPACITY_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Tokens of a micro-batch over those of the longest sequence."""


def dapple(workload: Workload) -> tuple[BaselineResult, ...]:
    """Micro-batches of the longest sequence's size, then of the best size."""
    results: list[BaselineResult] = []
    below_s = math.inf
    for variant in workload.variants:
        for factor in CAPACITY_FACTORS:
            results.append(_run(variant, TUNED, factor, below_s))
            if results[-1].feasible:
                below_s = min(below_s, results[-1].step_time_s)
    return (_run(workload, PAPER, 1.0), fastest(results))


def _run(
    workload: Workload, configuration: str, factor: float, below_s: float = math.inf
) -> BaselineResult:
    size = math.ceil(factor * workload.longest)
    chunker = fixed_size_chunker(workload, size)
    return run_pipeline(
        NAME,
        configuration,
        workload,
        chunker,
        f"whole sequences, {size:,} tokens",
        below_s=below_s,
    )
