"""What no plan can beat: the work of the most loaded stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_infinipipe.planner.costs import CostModel

__all__ = ["lower_bound_s"]


def lower_bound_s(lengths: Sequence[int], cost: CostModel) -> float:
    """Seconds of compute and all-to-all of the most loaded stage, whatever chunks and order are.

    No fixed cost per chunk, latency, gather, transfer, padding, recomputation or bubble.
    """
    sizes = np.array(lengths, dtype=np.float64)
    c = cost.coefficients
    layer_s = (3 * c.linear_s + 2 * c.all2all_s) * sizes.sum()
    layer_s += (c.attention_forward_s + c.attention_backward_s) * cost.area.before(sizes).sum()
    stages_s = [layers * layer_s for layers in cost.layout.stage_layers]
    stages_s[-1] += 3 * c.logits_s * sizes.sum()
    return float(max(stages_s))
