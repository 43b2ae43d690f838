"""When the simulator expects each instruction of a finished plan to run."""

from __future__ import annotations

from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.simulate import simulate
from ds_infinipipe.planner.types import Plan, Timeline

__all__ = ["forecast"]


def forecast(plan: Plan) -> Timeline:
    """Simulated timeline of a plan under the constants of its own model and cluster."""
    cost = CostModel(plan.model, plan.cluster, plan.layout, plan.zero_stage)
    costs = cost.chunk_costs(plan.chunks)
    return simulate(
        plan.streams,
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        recompute_s=costs.recompute_s,
        p2p_s=costs.p2p_s,
    )
