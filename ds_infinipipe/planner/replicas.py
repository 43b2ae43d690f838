"""Sharing a batch among data-parallel replicas."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import ClusterSpec, Layout, ModelSpec
from ds_infinipipe.planner.types import Instruction, Op, Plan, Prediction, SolverStats
from ds_infinipipe.planner.verify import peak_bytes_by_stage, verify_plan

__all__ = ["idle_plan", "split_batch"]


def split_batch(
    lengths: Sequence[int], num_replicas: int, cost: CostModel
) -> tuple[tuple[int, ...], ...]:
    """Sequence numbers of each replica, in batch order: longest predicted time first, each to the
    replica with the least so far. A replica gets none where there are fewer sequences."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [(0.0, replica) for replica in range(num_replicas)]
    time_s = [cost.total_time(length, length**2) for length in lengths]
    for sequence in sorted(range(len(lengths)), key=lambda i: (-time_s[i], i)):
        load, replica = heapq.heappop(loads)
        shares[replica].append(sequence)
        heapq.heappush(loads, (load + time_s[sequence], replica))
    return tuple(tuple(sorted(share)) for share in shares)


def idle_plan(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: Layout,
    settings: PlannerSettings,
    zero_stage: int,
) -> Plan:
    """The plan of a replica without a sequence: every stage only takes part in the step."""
    draft = Plan(
        model=model,
        cluster=cluster,
        layout=layout,
        lengths=(),
        alignment=settings.alignment,
        memory_limit_bytes=settings.memory_limit_bytes(cluster),
        chunks=(),
        pipelines=(),
        streams=((Instruction(Op.STEP),),) * layout.pp,
        predicted=Prediction(0.0, 0.0, (0,) * layout.pp),
        solver=SolverStats(settings.mode, 0, "optimal", 0.0, 0.0, "no sequence"),
        zero_stage=zero_stage,
        loss_block_tokens=settings.loss_block_tokens,
    )
    peaks = tuple(peak_bytes_by_stage(draft))
    plan = replace(draft, predicted=replace(draft.predicted, peak_bytes=peaks))
    verify_plan(plan)
    return plan
