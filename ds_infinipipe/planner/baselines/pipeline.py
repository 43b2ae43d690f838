"""Chunks through the project's own order, streams, simulator and memory scan.

What the pipeline baselines have in common: one pipeline of all chunks, and the same number of
recomputed layers for every chunk and stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.baselines.result import BaselineResult, Workload, infeasible
from ds_infinipipe.planner.costs import ChunkCosts, CostModel
from ds_infinipipe.planner.forecast import forecast_streams
from ds_infinipipe.planner.gradient_sum import GradientSums, Settled, settled_times
from ds_infinipipe.planner.layout_bounds import work_bound_s
from ds_infinipipe.planner.lower import lower_plan
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.order import (
    backward_order,
    count_slices,
    forward_order,
    stage_operations,
    window_size,
)
from ds_infinipipe.planner.replicas import split_batch
from ds_infinipipe.planner.schedule_arrays import simulate_schedule, static_schedule
from ds_infinipipe.planner.specs import Layout
from ds_infinipipe.planner.transfers import transfer_bytes
from ds_infinipipe.planner.types import Chunk, Op, PipelinePlan

__all__ = [
    "PipelineCase",
    "PipelineRun",
    "combine_replicas",
    "exposed_sum_s",
    "run_pipeline",
]

_GIB = 2**30

Chunker = Callable[[Sequence[int]], tuple[Chunk, ...]]


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One simulated step of a replica; `busy_s` is the mean over its stages.

    `settled` says when gradients are final; empty where their sum is charged otherwise.
    """

    step_time_s: float
    busy_s: float
    communication_s: float
    recompute_s: float
    peak_bytes: int
    recompute_layers: int
    settled: Settled = ()


@dataclass(frozen=True)
class PipelineCase:
    """Chunks of one replica with their costs.

    `layer_communication_s[chunk]` is the communication in one layer's forward and backward.
    `held_chunks` are the chunks as the memory model should see them, usually the same.
    """

    layout: Layout
    chunks: tuple[Chunk, ...]
    costs: ChunkCosts
    layer_communication_s: NDArray[np.float64]
    memory: MemoryModel
    held_chunks: tuple[Chunk, ...]
    keeps_all_in_flight: bool = False
    """GPipe: every forward before the first backward; else 1F1B with the window of Eq. 7."""

    @classmethod
    def of(
        cls,
        chunks: tuple[Chunk, ...],
        cost: CostModel,
        memory: MemoryModel,
        keeps_all_in_flight: bool = False,
    ) -> PipelineCase:
        return cls(
            cost.layout,
            chunks,
            cost.chunk_costs(chunks),
            cost.communication_times(*cost.sizes(chunks)),
            memory,
            chunks,
            keeps_all_in_flight,
        )

    @property
    def lower_bound_s(self) -> float:
        """The step without recomputation; of GPipe only the work of the busiest stage."""
        if not self.keeps_all_in_flight:
            schedule = static_schedule(self.chunks, self.layout.pp)
            return simulate_schedule(schedule, self.costs).makespan_s
        work = self.costs.forward_s + self.costs.backward_s
        return float(work.sum(axis=1).max())

    def run(self, limit_bytes: int, recompute: int | None = None) -> PipelineRun | None:
        """Simulate with `recompute` layers everywhere, or the fewest that fit; None if none do."""
        orders = self._orders()
        operations = self._operations(*orders)
        layers = self._fewest_layers(operations, limit_bytes, recompute or 0)
        if layers is None or (recompute is not None and layers > recompute):
            return None
        return self._simulate(orders, operations, layers)

    def _orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        forward = forward_order(self.chunks, range(len(self.chunks)))
        return forward, backward_order(self.chunks, forward)

    def _operations(
        self, forward: tuple[int, ...], backward: tuple[int, ...]
    ) -> list[tuple[tuple[Op, int], ...]]:
        pp, num_split = self.layout.pp, count_slices(self.chunks, forward)
        all_chunks = len(self.chunks)
        return [
            stage_operations(
                forward,
                backward,
                all_chunks if self.keeps_all_in_flight else window_size(pp, stage, num_split),
            )
            for stage in range(pp)
        ]

    def _fewest_layers(
        self, operations: Sequence[Sequence[tuple[Op, int]]], limit_bytes: int, least: int
    ) -> int | None:
        """Fewest layers of at least `least` that fit; bisection, as from 1 on more need less."""
        most = max(self.layout.stage_layers)
        low = min(least, most)
        if self._peak_bytes(operations, low) <= limit_bytes:
            return low
        if self._peak_bytes(operations, most) > limit_bytes:
            return None
        high = most
        while low + 1 < high:
            middle = (low + high) // 2
            if self._peak_bytes(operations, middle) <= limit_bytes:
                high = middle
            else:
                low = middle
        return high

    def _peak_bytes(self, operations: Sequence[Sequence[tuple[Op, int]]], layers: int) -> int:
        hidden = [self.memory.input_bytes(chunk) for chunk in self.held_chunks]
        transfers = transfer_bytes(operations, hidden)
        return max(
            self.memory.peak_bytes(
                stage,
                operations[stage],
                self.held_chunks,
                [min(layers, own_layers)] * len(self.chunks),
                transfers[stage],
            )
            for stage, own_layers in enumerate(self.layout.stage_layers)
        )

    def _simulate(
        self,
        orders: tuple[tuple[int, ...], tuple[int, ...]],
        operations: Sequence[Sequence[tuple[Op, int]]],
        layers: int,
    ) -> PipelineRun:
        forward, backward = orders
        counts = [min(layers, own_layers) for own_layers in self.layout.stage_layers]
        recompute = tuple((count,) * len(self.chunks) for count in counts)
        num_split = count_slices(self.chunks, forward)
        plan = PipelinePlan(forward, backward, recompute, num_split)
        streams = lower_plan([plan], self.chunks, self.layout, operations)
        costs = self.costs
        timeline = forecast_streams(streams, costs)
        pp = self.layout.pp
        return PipelineRun(
            timeline.makespan_s,
            float(np.mean(timeline.busy_s)),
            sum(self.layout.stage_layers) / pp * float(self.layer_communication_s.sum()),
            sum(counts) / pp * float(costs.recompute_s.sum()),
            self._peak_bytes(operations, layers),
            layers,
            settled_times(timeline, costs, self.layout),
        )


def run_pipeline(
    name: str,
    configuration: str,
    workload: Workload,
    chunker: Chunker,
    note: str,
    *,
    recompute: int | None = None,
    keeps_all_in_flight: bool = False,
    below_s: float = float("inf"),
) -> BaselineResult:
    """One step of `workload` on its layout with the chunks that `chunker` makes of each replica.

    Not tried where it takes `below_s` or more even without recomputation: it then counts as
    infeasible.
    """
    layout = workload.layout
    note = f"pp {layout.pp}, sp {layout.sp}, dp {layout.dp}, {note}"

    cost = CostModel(workload.model, workload.cluster, layout, workload.zero_stage)
    memory = MemoryModel(
        workload.model,
        layout,
        zero_stage=workload.zero_stage,
        loss_block_tokens=workload.settings.loss_block_tokens,
    )
    bound_s = work_bound_s(
        workload.lengths, workload.model, workload.cluster, layout, workload.zero_stage
    )
    if bound_s >= below_s:
        return infeasible(name, configuration, f"{note}: slower even without recomputation")
    if max(memory.static_bytes) >= workload.limit_bytes:
        return infeasible(name, configuration, f"{note}: no room beside the model states")
    runs: list[PipelineRun] = []
    for share in split_batch(workload.lengths, layout.dp, cost):
        if not share:
            continue
        chunks = chunker([workload.lengths[i] for i in share])
        case = PipelineCase.of(chunks, cost, memory, keeps_all_in_flight)
        if case.lower_bound_s >= below_s:
            return infeasible(name, configuration, f"{note}: slower even without recomputation")
        run = case.run(workload.limit_bytes, recompute)
        if run is None:
            limit = f"{workload.limit_bytes / _GIB:.2f} GiB"
            return infeasible(name, configuration, f"{note}: does not fit {limit} on a stage")
        runs.append(run)
    exposed_s = exposed_sum_s(workload, layout, runs)
    return combine_replicas(name, configuration, workload, runs, layout.dp, exposed_s, note)


def exposed_sum_s(workload: Workload, layout: Layout, runs: Sequence[PipelineRun]) -> float:
    """What is left of the gradients' sum when the slowest replica is done, as for our plans."""
    if layout.dp == 1:
        return 0.0
    sums = GradientSums.of(workload.model, layout, workload.cluster, workload.zero_stage)
    makespans_s = [run.step_time_s for run in runs]
    return sums.step_time_s(makespans_s, [run.settled for run in runs]) - max(makespans_s)


def combine_replicas(
    name: str,
    configuration: str,
    workload: Workload,
    runs: Sequence[PipelineRun],
    num_replicas: int,
    reduction_s: float,
    note: str,
) -> BaselineResult:
    """All replicas wait for the slowest and `reduction_s` more; those without a run idle."""
    slowest_s = max(run.step_time_s for run in runs)
    step_time_s = slowest_s + reduction_s
    busy_s = sum(run.busy_s for run in runs) / num_replicas
    layers = max(run.recompute_layers for run in runs)
    recomputed = f", {layers} layer{'' if layers == 1 else 's'} of a stage recomputed"
    return BaselineResult(
        name=name,
        configuration=configuration,
        step_time_s=step_time_s,
        tokens_per_s=workload.num_tokens / step_time_s,
        bubble_ratio=(slowest_s - busy_s) / step_time_s,
        communication_s=sum(r.communication_s for r in runs) / num_replicas + reduction_s,
        recompute_s=sum(r.recompute_s for r in runs) / num_replicas,
        peak_bytes=max(run.peak_bytes for run in runs),
        feasible=True,
        note=note + (recomputed if layers else ""),
    )
