"""When the simulator expects each instruction to run."""

from __future__ import annotations

from collections.abc import Sequence

from ds_infinipipe.planner.costs import ChunkCosts, CostModel
from ds_infinipipe.planner.simulate import simulate
from ds_infinipipe.planner.types import Instruction, Plan, Timeline

__all__ = ["forecast", "forecast_streams"]


def forecast(plan: Plan) -> Timeline:
    """Simulated timeline of a plan under the constants of its own model and cluster."""
    costs = CostModel.of_plan(plan).chunk_costs(plan.chunks)
    return forecast_streams(plan.streams, costs)


def forecast_streams(streams: Sequence[Sequence[Instruction]], costs: ChunkCosts) -> Timeline:
    """Simulated timeline of streams over chunks of these costs."""
    return simulate(
        streams,
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        recompute_s=costs.recompute_s,
        p2p_s=costs.p2p_s,
        input_s=costs.input_s,
        weight_s=costs.weight_s,
    )
