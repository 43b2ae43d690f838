"""Sharing a batch among data-parallel replicas."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.plan.plan import Plan, Prediction, SolverStats
from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.planner.predict.ledger import plan_peaks
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.verify.frame import verify_plan

__all__ = ["idle_plan", "split_batch"]

FloatArray: TypeAlias = NDArray[np.float64]

_MOST_EXCHANGES = 64
_EVEN_ENOUGH = 1e-5


def split_batch(
    lengths: Sequence[int], num_replicas: int, cost: CostModel
) -> tuple[tuple[int, ...], ...]:
    """Sequence numbers of each replica, in batch order; the slowest has as little as possible.

    Most work of the busiest stage first, each to the replica with the least so far; then sequences
    of the busiest and the idlest replica are exchanged while that helps. Fixed costs are those of
    chunks, not of sequences, and do not count. A replica gets none where there are fewer sequences.
    """
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    work_s = _work_s(lengths, cost)
    loads = [(0.0, replica) for replica in range(num_replicas)]
    for sequence in sorted(range(len(lengths)), key=lambda i: (-work_s[i], i)):
        load, replica = heapq.heappop(loads)
        shares[replica].append(sequence)
        heapq.heappush(loads, (load + float(work_s[sequence]), replica))
    for _ in range(_MOST_EXCHANGES):
        if not _exchange(shares, work_s):
            break
    return tuple(tuple(sorted(share)) for share in shares)


def _work_s(lengths: Sequence[int], cost: CostModel) -> FloatArray:
    """Time of each sequence on the stage that has most to do, without any fixed cost; [n]."""
    sizes = np.array(lengths, dtype=np.float64)
    c = cost.coefficients
    layer_s = (3 * c.linear_s + 2 * c.all2all_s) * sizes
    layer_s += (c.attention_forward_s + c.attention_backward_s) * cost.area.before(sizes)
    layers = cost.layout.stage_layers
    last_s = layers[-1] * layer_s + 3 * c.logits_s * sizes
    busiest_s = max(layers) * layer_s
    return np.asarray(last_s if last_s.sum() >= busiest_s.sum() else busiest_s)


def _exchange(shares: list[list[int]], work_s: FloatArray) -> bool:
    """Give away or swap the sequence that best evens out the busiest and the idlest replica."""
    loads = np.array([work_s[share].sum() for share in shares])
    busiest, idlest = int(loads.argmax()), int(loads.argmin())
    gap_s = float(loads[busiest] - loads[idlest])
    if gap_s <= _EVEN_ENOUGH * float(loads[busiest]):
        return False
    giver, taker = shares[busiest], shares[idlest]
    moved_s = work_s[giver][:, None] - np.append(work_s[taker], 0.0)[None, :]
    miss_s = np.abs(gap_s / 2 - moved_s)
    give, take = np.unravel_index(int(miss_s.argmin()), miss_s.shape)
    if miss_s[give, take] >= (1 - _EVEN_ENOUGH) * gap_s / 2:
        return False
    taker.append(giver.pop(int(give)))
    if take < len(taker) - 1:
        giver.append(taker.pop(int(take)))
    return True


def idle_plan(setup: Setup, settings: PlannerSettings) -> Plan:
    """The plan of a replica without a sequence: every stage only takes part in the step."""
    pp = setup.layout.pp
    draft = Plan(
        setup=setup,
        lengths=(),
        chunks=(),
        pipelines=(),
        streams=((Instruction(Op.STEP),),) * pp,
        predicted=Prediction(0.0, 0.0, (0,) * pp),
        solver=SolverStats(settings.mode, 0, "optimal", 0.0, 0.0, "no sequence"),
    )
    plan = replace(draft, predicted=replace(draft.predicted, peak_bytes=plan_peaks(draft)))
    verify_plan(plan)
    return plan
