"""What is known of a layout before it is planned: a bound that holds, and a rough estimate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_infinipipe.planner.chunking import chunk_sequences
from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.gradient_sum import GradientSums
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.replicas import split_batch
from ds_infinipipe.planner.schedule_arrays import shrinking_schedule, simulate_schedule
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import ClusterSpec, Layout, ModelSpec

__all__ = ["estimate_s", "work_bound_s"]

_SLICE_COUNTS = (1, 4, 8, 16)


def work_bound_s(
    lengths: Sequence[int],
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: Layout,
    zero_stage: int = 3,
) -> float:
    """No plan of this layout takes less: each stage's work, without any fixed cost, and its sum.

    Neither recomputation nor bubbles, latencies or gathers count. A replica has at least the mean
    work, and at least that of the longest sequence; what of the gradients' sum nothing hides comes
    on top.
    """
    cost = CostModel(model, cluster, layout, zero_stage)
    c, area_of = cost.coefficients, cost.area.before
    token_s = 3 * c.linear_s + 2 * c.all2all_s
    area_s = c.attention_forward_s + c.attention_backward_s
    sums = GradientSums.of(model, layout, cluster, zero_stage)

    def bound_s(tokens: float, area: float) -> float:
        layer_s = token_s * tokens + area_s * area
        stages = [layers * layer_s for layers in layout.stage_layers]
        stages[-1] += 3 * c.logits_s * tokens
        return max(work + sums.least_s(stage) for stage, work in enumerate(stages))

    area = math.fsum(area_of(int(n)) for n in lengths)
    longest = max(lengths, default=0)
    return max(
        bound_s(sum(lengths) / layout.dp, area / layout.dp), bound_s(longest, area_of(int(longest)))
    )


def estimate_s(
    lengths: Sequence[int],
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: Layout,
    settings: PlannerSettings,
    zero_stage: int = 3,
) -> float:
    """Simulated step of Algorithm 1's chunks without recomputation, best of a few slice counts.

    For the replica with the longest sequence. A plan may take less, with better chunks, or more,
    where memory binds; inf where not even the model states fit.
    """
    cost = CostModel(model, cluster, layout, zero_stage)
    memory = MemoryModel(
        model, layout, zero_stage=zero_stage, loss_block_tokens=settings.loss_block_tokens
    )
    limit_bytes = settings.memory_limit_bytes(cluster)
    if max(memory.static_bytes) >= limit_bytes:
        return math.inf
    share = _with_longest(lengths, layout, cost)
    times = []
    for k in _SLICE_COUNTS[: 1 if layout.pp == 1 else None]:
        chunks = chunk_sequences(
            share,
            k,
            cost,
            memory,
            limit_bytes,
            settings.alignment,
            layout.sp,
        )
        schedule = shrinking_schedule(chunks, layout.pp)
        times.append(simulate_schedule(schedule, cost.chunk_costs(chunks)).makespan_s)
    return min(times) + GradientSums.of(model, layout, cluster, zero_stage).least_s(0)


def _with_longest(lengths: Sequence[int], layout: Layout, cost: CostModel) -> list[int]:
    """Lengths of the replica that has the longest sequence."""
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    shares = split_batch(lengths, layout.dp, cost)
    return [lengths[i] for i in next(share for share in shares if longest in share)]
