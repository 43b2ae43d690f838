"""Dry run of instruction streams: what `simulate_schedule` does for operation lists.

A walk over the stages, round and round; each runs until it needs something that no stage has sent
yet. A round without progress is a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.stream import Instruction, Op, Span, Timeline

__all__ = ["simulate"]

_GRID_ROWS = 16
_GRID_HISTORY = 4


def simulate(
    streams: Sequence[Sequence[Instruction]],
    *,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    recompute_s: ArrayLike,
    p2p_s: ArrayLike,
    input_s: ArrayLike | None = None,
    weight_s: ArrayLike | None = None,
) -> Timeline:
    """Timeline of one step.

    Shapes: `forward_s`, `backward_s`, `input_s` and `weight_s` [pp, chunks], `recompute_s` (one
    layer) and `p2p_s` [chunks], all in seconds. B of chunk k on stage p takes backward_s[p, k] +
    r * recompute_s[k], r being the instruction's layer count; I takes input_s in place of
    backward_s, W takes weight_s; those two are needed only where a stream has I and W. The
    operations of a stage run one after the other; sends and receives cost the stage nothing, data
    arrives p2p_s after the send and is needed only where it is consumed. STEP takes no time.

    Raises ScheduleError with one row per stage where the streams deadlock, and for an I or W
    without times.
    """
    halves = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    if input_s is None or weight_s is None:
        if any(i.op in halves for stream in streams for i in stream):
            raise ScheduleError("the streams have I and W, but only times of whole backwards")
        input_s = weight_s = backward_s
    walk = _Walk(streams, forward_s, backward_s, recompute_s, p2p_s, input_s, weight_s)
    stages = range(len(streams))
    while any([walk.advance(stage) for stage in stages]):
        pass
    if not walk.is_done:
        raise ScheduleError(walk.describe_deadlock())
    return walk.timeline()


class _Walk:
    """Where each stage stands, when it is free, and when what it needs arrives."""

    def __init__(
        self,
        streams: Sequence[Sequence[Instruction]],
        forward_s: ArrayLike,
        backward_s: ArrayLike,
        recompute_s: ArrayLike,
        p2p_s: ArrayLike,
        input_s: ArrayLike,
        weight_s: ArrayLike,
    ) -> None:
        self.streams = streams
        times = [np.asarray(t, float) for t in (forward_s, backward_s, input_s, weight_s)]
        forward = times[0]
        is_odd = forward.ndim != 2 or len(forward) != len(streams)
        if is_odd or any(t.shape != forward.shape for t in times):
            raise ScheduleError(
                f"{len(streams)} streams need forward and backward times of shape "
                f"[{len(streams)}, chunks], not {' and '.join(str(t.shape) for t in times)}"
            )
        # nested lists: reading one float is 10 times faster than from an array
        self.forward_s: list[list[float]] = forward.tolist()
        self.backward_s: dict[Op, list[list[float]]] = {
            Op.BACKWARD: times[1].tolist(),
            Op.BACKWARD_INPUT: times[2].tolist(),
        }
        self.weight_s: list[list[float]] = times[3].tolist()
        self.recompute_s: list[float] = np.asarray(recompute_s, float).tolist()
        self.p2p_s: list[float] = np.asarray(p2p_s, float).tolist()
        pp = len(streams)
        self.position = [0] * pp
        self.clock_s = [0.0] * pp
        self.spans: list[list[Span]] = [[] for _ in range(pp)]
        # [stage][chunk] -> arrival time of what F (of what B) consumes; one row more at either end,
        # so that the outermost stages need no special case
        self.activation_s: list[dict[int, float]] = [{} for _ in range(pp + 1)]
        self.gradient_s: list[dict[int, float]] = [{} for _ in range(pp + 1)]
        if pp:
            self.activation_s[0] = dict.fromkeys(range(forward.shape[1]), 0.0)

    @property
    def is_done(self) -> bool:
        return all(p == len(s) for p, s in zip(self.position, self.streams, strict=True))

    def advance(self, stage: int) -> bool:
        """Run the stage until it has to wait; True if it ran anything."""
        stream, begin, clock = self.streams[stage], self.position[stage], self.clock_s[stage]
        activation_s, gradient_s = self.activation_s[stage], self.gradient_s[stage]
        forward_s, weight_s, p2p_s = self.forward_s[stage], self.weight_s[stage], self.p2p_s
        backward_s = {op: times[stage] for op, times in self.backward_s.items()}
        is_last = stage == len(self.streams) - 1
        spans = self.spans[stage]
        position = begin
        while position < len(stream):
            instruction = stream[position]
            op, chunk = instruction.op, instruction.chunk
            if op is Op.FORWARD:
                arrival = activation_s.get(chunk)
                if arrival is None:
                    break
                start = arrival if arrival > clock else clock
                clock = start + forward_s[chunk]
                spans.append(Span(stage, op, chunk, start, clock))
                if is_last:
                    gradient_s[chunk] = clock
            elif op in backward_s:
                arrival = gradient_s.get(chunk)
                if arrival is None:
                    break
                start = arrival if arrival > clock else clock
                own_s = backward_s[op][chunk]
                clock = start + own_s + instruction.recompute * self.recompute_s[chunk]
                spans.append(Span(stage, op, chunk, start, clock))
            elif op is Op.BACKWARD_WEIGHT:
                start = clock
                clock = start + weight_s[chunk]
                spans.append(Span(stage, op, chunk, start, clock))
            elif op is Op.SEND_ACTIVATION:
                self.activation_s[stage + 1][chunk] = clock + p2p_s[chunk]
            elif op is Op.SEND_GRADIENT:
                self.gradient_s[stage - 1][chunk] = clock + p2p_s[chunk]
            position += 1
        self.position[stage], self.clock_s[stage] = position, clock
        return position > begin

    def timeline(self) -> Timeline:
        busy_s = tuple(sum(span.end_s - span.start_s for span in row) for row in self.spans)
        makespan_s = max(self.clock_s, default=0.0)
        available_s = makespan_s * len(self.streams)
        return Timeline(
            spans=tuple(span for row in self.spans for span in row),
            makespan_s=makespan_s,
            bubble_ratio=1.0 - sum(busy_s) / available_s if available_s else 0.0,
            busy_s=busy_s,
        )

    def describe_deadlock(self) -> str:
        rows = [self._describe_stage(stage) for stage in range(len(self.streams))]
        shown = rows[:_GRID_ROWS]
        if len(rows) > _GRID_ROWS:
            shown.append(f"  ... and {len(rows) - _GRID_ROWS} more stages")
        return "the streams deadlock, no stage can continue:\n" + "\n".join(shown)

    def _describe_stage(self, stage: int) -> str:
        stream, position = self.streams[stage], self.position[stage]
        done = " ".join(str(i) for i in stream[max(0, position - _GRID_HISTORY) : position])
        head = f"  stage {stage:<3d} {position:>5d}/{len(stream):<5d} {done:>36s} "
        if position == len(stream):
            return head + "| finished"
        blocked = stream[position]
        if blocked.op is Op.FORWARD:
            cause = f"SEND_F{blocked.chunk} of stage {stage - 1}"
        elif stage < len(self.streams) - 1:
            cause = f"SEND_B{blocked.chunk} of stage {stage + 1}"
        else:
            cause = f"F{blocked.chunk} of its own"
        return head + f"| {blocked} waits for {cause}"
