"""Chunks through the project's own order, streams, simulator and memory scan.

What the pipeline baselines have in common: one pipeline of all chunks, and the same number of
recomputed layers for every chunk and stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.baselines.result import BaselineResult, Workload, infeasible
from ds_infinipipe.planner.facts.setup import Layout, Setup
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.order import backward_order, forward_order
from ds_infinipipe.planner.predict.ledger import Ledger
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.replica_sum import GradientSums, Settled, settled_times
from ds_infinipipe.planner.predict.schedule import (
    ScheduleArrays,
    build_schedule,
    simulate_schedule,
    static_schedule,
)
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel
from ds_infinipipe.planner.search.layouts import work_bound_s
from ds_infinipipe.planner.search.replicas import split_batch

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
        schedule = self._schedule()
        layers = self._fewest_layers(schedule, limit_bytes, recompute or 0)
        if layers is None or (recompute is not None and layers > recompute):
            return None
        return self._simulate(schedule, layers)

    def _schedule(self) -> ScheduleArrays:
        if not self.keeps_all_in_flight:
            return static_schedule(self.chunks, self.layout.pp)
        forward = forward_order(self.chunks, range(len(self.chunks)))
        everything = ((len(forward),) * len(forward),) * self.layout.pp
        return build_schedule(forward, backward_order(self.chunks, forward), everything)

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self.memory, self.held_chunks)

    def _fewest_layers(self, schedule: ScheduleArrays, limit_bytes: int, least: int) -> int | None:
        """Fewest layers of at least `least` that fit; bisection, as from 1 on more need less."""
        most = max(self.layout.stage_layers)
        low = min(least, most)
        if self._peak_bytes(schedule, low) <= limit_bytes:
            return low
        if self._peak_bytes(schedule, most) > limit_bytes:
            return None
        high = most
        while low + 1 < high:
            middle = (low + high) // 2
            if self._peak_bytes(schedule, middle) <= limit_bytes:
                high = middle
            else:
                low = middle
        return high

    def _counts(self, layers: int) -> NDArray[np.int64]:
        """`layers` of every chunk [pp, chunks], fewer on stages that have fewer."""
        return np.repeat(np.minimum(layers, self._ledger.layers)[:, None], len(self.chunks), axis=1)

    def _peak_bytes(self, schedule: ScheduleArrays, layers: int) -> int:
        return int(self._ledger.peaks(schedule, self._counts(layers)).max())

    def _simulate(self, schedule: ScheduleArrays, layers: int) -> PipelineRun:
        counts, costs, pp = self._counts(layers), self.costs, self.layout.pp
        timeline = simulate_schedule(schedule, costs, counts).timeline()
        return PipelineRun(
            timeline.makespan_s,
            float(np.mean(timeline.busy_s)),
            sum(self.layout.stage_layers) / pp * float(self.layer_communication_s.sum()),
            int(counts[:, 0].sum()) / pp * float(costs.recompute_s.sum()),
            self._peak_bytes(schedule, layers),
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
    layout = workload.setup.layout
    note = f"pp {layout.pp}, sp {layout.sp}, dp {layout.dp}, {note}"

    cost, memory = CostModel(workload.setup), MemoryModel(workload.setup)
    if work_bound_s(workload.lengths, workload.setup) >= below_s:
        return infeasible(name, configuration, f"{note}: slower even without recomputation")
    if max(memory.static_bytes) >= workload.setup.limit_bytes:
        return infeasible(name, configuration, f"{note}: no room beside the model states")
    runs: list[PipelineRun] = []
    for share in split_batch(workload.lengths, layout.dp, cost):
        if not share:
            continue
        chunks = chunker([workload.lengths[i] for i in share])
        case = PipelineCase.of(chunks, cost, memory, keeps_all_in_flight)
        if case.lower_bound_s >= below_s:
            return infeasible(name, configuration, f"{note}: slower even without recomputation")
        run = case.run(workload.setup.limit_bytes, recompute)
        if run is None:
            limit = f"{workload.setup.limit_bytes / _GIB:.2f} GiB"
            return infeasible(name, configuration, f"{note}: does not fit {limit} on a stage")
        runs.append(run)
    exposed_s = exposed_sum_s(workload.setup, runs)
    return combine_replicas(name, configuration, workload, runs, layout.dp, exposed_s, note)


def exposed_sum_s(setup: Setup, runs: Sequence[PipelineRun]) -> float:
    """What is left of the gradients' sum when the slowest replica is done, as for our plans."""
    if setup.layout.dp == 1:
        return 0.0
    sums = GradientSums.of(setup)
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
