"""When everything of a plan runs, how long its step is, and where the time goes.

Memory is not simulated: it depends on the order alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op, Timeline
from ds_infinipipe.planner.predict.schedule import simulate_schedule, stream_schedule
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel

__all__ = ["Breakdown", "break_down", "break_down_plan", "forecast", "forecast_streams"]


def forecast(plan: Plan) -> Timeline:
    """Simulated timeline of a plan under the constants of its own model and cluster."""
    costs = CostModel(plan.setup).chunk_costs(plan.chunks)
    return forecast_streams(plan.streams, costs)


def forecast_streams(streams: Sequence[Sequence[Instruction]], costs: ChunkCosts) -> Timeline:
    """Simulated timeline of streams, as `lower_plan` makes them, over chunks of these costs.

    Raises ScheduleError where they deadlock, or where a send does not follow what it sends.
    """
    schedule, counts = stream_schedule(streams, costs.p2p_s.size)
    return simulate_schedule(schedule, costs, counts).timeline()


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a step, mean over the stages.

    `communication_s` is gathers and all-to-alls that do not hide under compute; those of a
    recomputation are part of `recompute_s`.
    """

    communication_s: float
    recompute_s: float


def break_down(
    streams: Sequence[Sequence[Instruction]], chunks: Sequence[Chunk], cost: CostModel
) -> Breakdown:
    """Shares of the chunks' predicted times that are communication and recomputation."""
    tokens, areas = cost.sizes(chunks)
    layer_s = cost.recompute_times(tokens, areas)
    split_s = cost.split_times(tokens, areas)
    recomputed = np.zeros(len(chunks))
    communication_s = sum(cost.layout.stage_layers) * float(
        cost.communication_times(tokens, areas).sum()
    )
    for stream, layers in zip(streams, cost.layout.stage_layers, strict=True):
        for instruction in stream:
            if instruction.op.makes_gradient:
                recomputed[instruction.chunk] += instruction.recompute
            elif instruction.op is Op.BACKWARD_WEIGHT:
                communication_s += layers * float(split_s[instruction.chunk])
    return Breakdown(
        communication_s / len(streams), float((recomputed * layer_s).sum()) / len(streams)
    )


def break_down_plan(plan: Plan) -> Breakdown:
    """`break_down` under the constants of the plan's own model and cluster."""
    return break_down(plan.streams, plan.chunks, CostModel(plan.setup))
