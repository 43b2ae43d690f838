"""GPipe: all forwards, then all backwards, over micro-batches of whole sequences.

Every micro-batch is in flight at once, so its memory grows with the batch. The paper does not run
it; its "paper" configuration recomputes every layer, as GPipe's own does. Tuned recomputes the
fewest layers that fit. Streams, simulator and memory scan are those of our plans.
"""

from __future__ import annotations

import math

from ds_infinipipe.baselines.dapple import CAPACITY_FACTORS
from ds_infinipipe.baselines.pipeline import run_pipeline
from ds_infinipipe.baselines.result import PAPER, TUNED, BaselineResult, Workload, fastest
from ds_infinipipe.baselines.seq1f1b import fixed_size_chunker

__all__ = ["gpipe"]

NAME = "GPipe"


def gpipe(workload: Workload) -> tuple[BaselineResult, ...]:
    """Everything recomputed in micro-batches of the longest sequence's size, then tuned."""
    variants = workload.variants
    results = [_run(w, TUNED, factor, None) for w in variants for factor in CAPACITY_FACTORS]
    all_layers = max(workload.setup.layout.stage_layers)
    return (_run(workload, PAPER, 1.0, all_layers), fastest(results))


def _run(
    workload: Workload, configuration: str, factor: float, layers: int | None
) -> BaselineResult:
    size = math.ceil(factor * workload.longest)
    return run_pipeline(
        NAME,
        configuration,
        workload,
        fixed_size_chunker(workload, size),
        f"whole sequences, {size:,} tokens",
        recompute=layers,
        keeps_all_in_flight=True,
    )
