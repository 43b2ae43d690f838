"""How long the replicas' sum of gradients outlasts the last backward.

A stage adds its gradients up once a step, layer by layer from the last to the first: each layer as
soon as its backward in the last chunk is done on every replica, beside the backward of the layers
below. What is left after the last backward is at least the sums of the stage's first layer and of
the embedding. Where the optimizer's states are cut over the replicas, a sum is a reduce-scatter and
the new weights are gathered at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.facts.links import replica_sum_s, sum_shares_links
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import Layout, Setup
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import NOTHING, SPLIT, Op, Span, Timeline
from ds_infinipipe.planner.predict.schedule import SimulatedSchedule, decode
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel, analytic_coefficients

__all__ = ["GradientSums", "Settled", "chain_end_s", "settled_times", "step_time_s"]

Floats: TypeAlias = NDArray[np.float64]

Settled: TypeAlias = tuple[Floats, ...]
"""By stage: when each unit has its last gradient, [units] from the last to the first, seconds.

Units are the head on the last stage, the decoder layers, the embedding on the first stage. The last
entry is the end of the stage's last backward.
"""


def chain_end_s(ready_s: Floats, sums_s: Floats, own_s: float) -> float:
    """When the last of n sums is done that follow each other on one link.

    Sum k starts at `ready_s[k]` at the earliest and after sum k - 1; between the two the link also
    carries the stage's own traffic of a layer, `own_s`. So a busy link ends at the largest
    ready_s[k] + sum of sums_s[k:] + own_s * (n - 1 - k). Shapes [n]; n is at least 1.
    """
    rest_s = np.cumsum(sums_s[::-1])[::-1]
    below = np.arange(ready_s.size - 1, -1, -1)
    return float((ready_s + rest_s + own_s * below).max())


@dataclass(frozen=True)
class GradientSums:
    """Seconds of every unit's sum over the replicas: by stage, [units] from last to first."""

    layout: Layout
    units_s: tuple[Floats, ...]
    own_s: float
    """A layer's gather and reduce-scatter, where they share the links of the sum; else 0."""
    overlap: float
    """Share of what could hide under compute that does: the cluster's `zero_overlap`."""
    gather_s: float = 0.0
    """Gather of a stage's new weights over the replicas; 0 where each has all of them."""

    @classmethod
    def of(cls, setup: Setup) -> GradientSums:
        """All zeros with one replica. Gradients are four bytes an element, sharded over sp with
        ZeRO-3; a weight tied inside a stage is summed with the embedding.
        """
        layout, cluster, execution = setup.layout, setup.cluster, setup.execution
        is_sharded = execution.zero_stage == 3
        shards = layout.sp if is_sharded else 1
        units = _unit_params(setup.model, layout)
        is_cut = execution.shards_optimizer_over_dp and is_sharded
        # gradients in host memory are summed as a whole
        passes = 1 if is_cut and not execution.offloads_optimizer else 2
        units_s = tuple(
            np.array([replica_sum_s(4 * n / shards, layout, cluster, passes) for n in params])
            for params in units
        )
        weight_bytes = execution.dtype_bytes * max(map(sum, units)) / shards
        gather_s = replica_sum_s(weight_bytes, layout, cluster, 1) if is_cut else 0.0
        is_shared = layout.dp > 1 and sum_shares_links(layout, cluster)
        own_s = 2 * analytic_coefficients(setup).gather_s if is_shared else 0.0
        # gradients in host memory are summed when all are there
        overlap = 0.0 if execution.offloads_optimizer else cluster.zero_overlap
        return cls(layout, units_s, own_s, overlap, gather_s)

    def least_s(self, stage: int) -> float:
        """What no step hides: sums that start at the last backward's end, or cannot overlap."""
        ends_with = 2 if stage == 0 else 1
        total_s = float(self.units_s[stage].sum())
        last_s = float(self.units_s[stage][-ends_with:].sum())
        return last_s + (1.0 - self.overlap) * (total_s - last_s) + self.gather_s

    def step_time_s(self, makespans_s: Sequence[float], settled: Sequence[Settled]) -> float:
        """End of the step: every stage's replicas wait for the slowest of them, layer by layer.

        With some of the replicas only, a lower bound. An idle replica has no entry in `settled`.
        """
        end_s = max(makespans_s)
        for stage, sums_s in enumerate(self.units_s):
            ready_s = np.max([times[stage] for times in settled], axis=0)
            backward_end_s, total_s = float(ready_s[-1]), float(sums_s.sum())
            hidden = min(chain_end_s(ready_s, sums_s, self.own_s), backward_end_s + total_s)
            exposed_s = backward_end_s + total_s
            end_s = max(end_s, self.overlap * hidden + (1.0 - self.overlap) * exposed_s)
        return end_s + self.gather_s

    def schedule_s(self, simulated: SimulatedSchedule, costs: ChunkCosts) -> float:
        """Least step of a replica that runs this schedule, whatever the others do."""
        timeline = Timeline(_final_spans(simulated), simulated.makespan_s, 0.0, ())
        settled = settled_times(timeline, costs, self.layout)
        return self.step_time_s([simulated.makespan_s], [settled])


def step_time_s(plans: Sequence[Plan]) -> float:
    """Predicted time of a step that runs one plan on each replica, the gradients' sum included."""
    makespans_s = [plan.predicted.step_time_s for plan in plans]
    first = plans[0]
    if first.layout.dp == 1:
        return max(makespans_s)
    sums = GradientSums.of(first.setup)
    busy = [plan for plan in plans if plan.chunks]
    settled = [
        settled_times(forecast(plan), CostModel(plan.setup).chunk_costs(plan.chunks), plan.layout)
        for plan in busy
    ]
    return sums.step_time_s(makespans_s, settled)


def settled_times(timeline: Timeline, costs: ChunkCosts, layout: Layout) -> Settled:
    """When each unit of each stage has its last gradient in one replica's timeline.

    The recomputed layers are the first of a stage, whose backward comes last.
    """
    last: dict[tuple[int, bool], Span] = {}
    for span in timeline.spans:
        if span.op is not Op.BACKWARD_INPUT:
            last[span.stage, span.op is Op.FORWARD] = span
    times = []
    for stage, layers in enumerate(layout.stage_layers):
        final = last[stage, False]
        ends_s = _layer_ends_s(final, costs, layers)
        head = [last[stage, True].end_s] if stage == layout.pp - 1 else []
        embedding = [final.end_s] if stage == 0 else []
        times.append(np.array([*head, *ends_s, *embedding]))
    return tuple(times)


def _final_spans(simulated: SimulatedSchedule) -> tuple[Span, ...]:
    """The last F of every stage, and the last B or W."""
    codes = simulated.schedule.operations
    is_forward = (codes >= 0) & (codes < SPLIT)
    makes_weights = ((codes < 0) & (codes >= -SPLIT)) | ((codes >= SPLIT) & (codes < NOTHING))
    spans = []
    for kind in (is_forward, makes_weights):
        places = codes.shape[1] - 1 - kind[:, ::-1].argmax(axis=1)
        for stage, place in enumerate(places.tolist()):
            op, chunk = decode(int(codes[stage, place]))
            start_s, end_s = simulated.start_s[stage, place], simulated.end_s[stage, place]
            spans.append(Span(stage, op, chunk, float(start_s), float(end_s)))
    return tuple(spans)


def _layer_ends_s(final: Span, costs: ChunkCosts, layers: int) -> list[float]:
    """Ends of a stage's decoder layers in one B or W, from the last layer to the first."""
    takes_s = final.end_s - final.start_s
    recomputed, again_s = 0, float(costs.recompute_s[final.chunk])
    if final.op is Op.BACKWARD:
        whole_s = float(costs.backward_s[final.stage, final.chunk])
        recomputed = round((takes_s - whole_s) / again_s) if again_s else 0
    layer_s = (takes_s - recomputed * again_s) / layers
    ends_s = [
        final.start_s + done * layer_s + max(0, done - layers + recomputed) * again_s
        for done in range(1, layers)
    ]
    return [*ends_s, final.end_s]


def _unit_params(model: ModelSpec, layout: Layout) -> list[list[int]]:
    params = [[model.layer_params] * layers for layers in layout.stage_layers]
    is_one_weight = model.tied_embeddings and layout.pp == 1
    params[-1].insert(0, 0 if is_one_weight else model.embedding_params)
    params[0].append(model.embedding_params)
    return params
