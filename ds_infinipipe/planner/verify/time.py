"""The part of the verifier that counts seconds: its own walk over the streams, with clocks.

Only the formulas of CostModel (per chunk, layer and transfer) are shared with the planner; when
each instruction runs is decided here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel

__all__ = ["check_time", "step_times"]

_TOLERANCE = 1e-9  # of a step: sums in another order differ in their last bits
_REPAIR = "it was edited or made for other constants; plan the batch again"
_PEERS = {Op.SEND_ACTIVATION: 1, Op.SEND_GRADIENT: -1}


def check_time(plan: Plan) -> None:
    """Raise ScheduleError unless the plan states the step time and bubbles of its own streams.

    The plan's streams must have been checked. Times are seconds, with the constants of the plan's
    model and cluster; both figures may differ by rounding.
    """
    stated = plan.predicted
    for name, value in (("step time", stated.step_time_s), ("bubble ratio", stated.bubble_ratio)):
        # NaN fails the comparison; whole numbers beyond floats do too, where isfinite() overflows
        if not (isinstance(value, (int, float)) and abs(value) <= sys.float_info.max):
            text = f"the plan states a {name} of {value!r}, which is no finite number"
            raise ScheduleError(f"{text}: {_REPAIR}")
    step_s, bubble_ratio = step_times(plan)
    if not math.isclose(stated.step_time_s, step_s, rel_tol=_TOLERANCE):
        raise ScheduleError(
            f"the plan states a step time of {stated.step_time_s:.12g} s, but its streams take "
            f"{step_s:.12g} s: {_REPAIR}"
        )
    if not math.isclose(stated.bubble_ratio, bubble_ratio, rel_tol=0.0, abs_tol=_TOLERANCE):
        raise ScheduleError(
            f"the plan states a bubble ratio of {stated.bubble_ratio:.12g}, but its streams have "
            f"{bubble_ratio:.12g}: {_REPAIR}"
        )


def step_times(plan: Plan) -> tuple[float, float]:
    """Seconds until the last stage is done, and the stages' mean idle share of them.

    Raises ScheduleError where the streams deadlock or the plan's constants give no times.
    """
    try:
        costs = CostModel(plan.setup).chunk_costs(plan.chunks)
    except ZeroDivisionError as error:
        raise ScheduleError(f"the plan's times cannot be counted: {error}") from error
    walk = _Walk(plan, costs)
    walk.run()
    step_s = max(walk.ends_s, default=0.0)
    whole_s = step_s * plan.layout.pp
    return step_s, 1.0 - sum(walk.busy_s) / whole_s if whole_s else 0.0


class _Walk:
    """When each stage is done, and how long it has worked; a stage waits only where it consumes."""

    def __init__(self, plan: Plan, costs: ChunkCosts) -> None:
        assert costs.input_s is not None and costs.weight_s is not None
        self._streams = plan.streams
        # lists: reading one number from an array takes ten times as long
        self._times_s: dict[Op, list[list[float]]] = {
            Op.FORWARD: costs.forward_s.tolist(),
            Op.BACKWARD: costs.backward_s.tolist(),
            Op.BACKWARD_INPUT: costs.input_s.tolist(),
            Op.BACKWARD_WEIGHT: costs.weight_s.tolist(),
        }
        self._again_s: list[float] = costs.recompute_s.tolist()
        self._transfer_s: list[float] = costs.p2p_s.tolist()
        self._arrivals_s: dict[tuple[Op, int, int], float] = {}  # by send, receiving stage, chunk
        self.ends_s = [0.0] * plan.layout.pp
        self.busy_s = [0.0] * plan.layout.pp

    def run(self) -> None:
        """Each stage in turn as far as it gets, until all are done."""
        waiting = {stage: self._stage(stage) for stage in range(len(self._streams))}
        num_sent = -1
        while waiting:
            if num_sent == len(self._arrivals_s):
                raise ScheduleError(f"the streams deadlock: stages {sorted(waiting)} wait for ever")
            num_sent = len(self._arrivals_s)
            waiting = {p: stage for p, stage in waiting.items() if next(stage, True) is None}

    def _stage(self, stage: int) -> Iterator[None]:
        """Runs a stream; yields where what it needs has not been sent yet."""
        times_s = {op: rows[stage] for op, rows in self._times_s.items()}
        sources, arrivals_s = self._sources(stage), self._arrivals_s
        clock_s = busy_s = 0.0
        for instruction in self._streams[stage]:
            op, chunk = instruction.op, instruction.chunk
            if op in times_s:
                if op in sources:
                    key = sources[op], stage, chunk
                    while key not in arrivals_s:
                        yield
                    clock_s = max(clock_s, arrivals_s[key])
                again = 0 if op is Op.FORWARD else instruction.recompute
                own_s = times_s[op][chunk] + again * self._again_s[chunk]
                clock_s, busy_s = clock_s + own_s, busy_s + own_s
            elif op in _PEERS:
                arrivals_s[op, stage + _PEERS[op], chunk] = clock_s + self._transfer_s[chunk]
        self.ends_s[stage], self.busy_s[stage] = clock_s, busy_s

    def _sources(self, stage: int) -> dict[Op, Op]:
        """By operation, the neighbour's send that it waits for."""
        sources = {Op.FORWARD: Op.SEND_ACTIVATION} if stage > 0 else {}
        if stage < len(self._streams) - 1:
            sources[Op.BACKWARD] = sources[Op.BACKWARD_INPUT] = Op.SEND_GRADIENT
        return sources
