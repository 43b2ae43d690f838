"""Operation lists and their simulation as arrays: fast enough to try many candidates per batch.

The orders of plan/order.py through the compiled walks of kernels.py. An operation is an int64, see
plan/stream.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.order import (
    backward_order,
    count_slices,
    forward_order,
    shrinking_windows,
    slices_by_position,
    static_windows,
)
from ds_infinipipe.planner.plan.plan import PipelinePlan
from ds_infinipipe.planner.plan.stream import NOTHING, SPLIT, Instruction, Op, Span, Timeline
from ds_infinipipe.planner.predict.time import ChunkCosts

if TYPE_CHECKING:
    from ds_infinipipe.planner.predict.kernels import Times

__all__ = [
    "ScheduleArrays",
    "SimulatedSchedule",
    "build_schedule",
    "check_shape",
    "decode",
    "encode",
    "join_schedules",
    "load_kernels",
    "pipeline_counts",
    "pipeline_schedule",
    "schedule_times",
    "shrinking_schedule",
    "simulate_schedule",
    "static_schedule",
    "stream_schedule",
]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]

_SHOWN_STAGES = 8
_SENDS = {
    Op.SEND_ACTIVATION: (Op.FORWARD,),
    Op.SEND_GRADIENT: (Op.BACKWARD, Op.BACKWARD_INPUT),
}


@dataclass(frozen=True, eq=False)
class ScheduleArrays:
    """Compute operations of every stage: `operations` [pp, m] over chunk ids.

    `forward` and `backward` [chunks] are the orders that all stages share; of several joined
    pipelines, one after the other.
    """

    operations: IntArray
    forward: IntArray
    backward: IntArray

    @property
    def pp(self) -> int:
        return int(self.operations.shape[0])

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest chunk id."""
        return int(self.forward.max(initial=-1)) + 1

    @property
    def is_split(self) -> bool:
        """True where a backward is an I and a W."""
        return int(self.operations.shape[1]) > 2 * self.forward.size

    def as_operations(self) -> tuple[tuple[tuple[Op, int], ...], ...]:
        """The lists that `lower_plan` takes."""
        return tuple(
            tuple(decode(code) for code in row if code != NOTHING)
            for row in self.operations.tolist()
        )


def build_schedule(
    forward: Sequence[int], backward: Sequence[int], windows: Sequence[Sequence[int]]
) -> ScheduleArrays:
    """`stage_operations` of all stages; windows[stage][j] chunks in flight before backward j.

    Raises ScheduleError when the orders are not of the same chunks or a backward would precede its
    forward.
    """
    orders = np.array(forward, dtype=np.int64), np.array(backward, dtype=np.int64)
    sizes = np.array(windows, dtype=np.int64)
    _check_orders(*orders, sizes)
    operations, stage, position = load_kernels().build_operations(*orders, sizes)
    if stage >= 0:
        chunk = backward[position]
        raise ScheduleError(
            f"stage {stage}: a window of {sizes[stage, position]} chunks reaches B{chunk} before "
            f"F{chunk}: the window must hold every slice of a sequence"
        )
    return ScheduleArrays(operations, *orders)


def _check_orders(forward: IntArray, backward: IntArray, windows: IntArray) -> None:
    ids = np.sort(forward)
    if not np.array_equal(ids, np.sort(backward)):
        raise ScheduleError("the forward and the backward order must name the same chunks")
    if (ids < 0).any() or (ids[1:] == ids[:-1]).any():
        raise ScheduleError("an order names each chunk once, by an id of at least 0")
    if windows.ndim != 2 or windows.shape[1] != ids.size:
        raise ScheduleError(
            f"windows of shape {windows.shape} do not fit {ids.size} chunks: give [pp, {ids.size}]"
        )


def static_schedule(
    chunks: Sequence[Chunk], pp: int, members: Sequence[int] | None = None, extra: int = 0
) -> ScheduleArrays:
    """One pipeline of `members` (all chunks) in the usual orders under the windows of Eq. 7."""
    forward = forward_order(chunks, range(len(chunks)) if members is None else members)
    backward = backward_order(chunks, forward)
    num_split = count_slices(chunks, forward)
    return build_schedule(forward, backward, static_windows(pp, len(forward), num_split, extra))


def shrinking_schedule(
    chunks: Sequence[Chunk], pp: int, members: Sequence[int] | None = None, extra: int = 0
) -> ScheduleArrays:
    """One pipeline of `members` (all chunks) in the usual orders, its windows shrinking."""
    forward = forward_order(chunks, range(len(chunks)) if members is None else members)
    backward = backward_order(chunks, forward)
    windows = shrinking_windows(pp, slices_by_position(chunks, backward), extra)
    return build_schedule(forward, backward, windows)


def pipeline_schedule(pipelines: Sequence[PipelinePlan], pp: int) -> ScheduleArrays:
    """1F1B pipelines that run one after the other (windows of Eq. 7).

    Their gradients accumulate into one optimizer step.
    """
    return join_schedules(
        [
            build_schedule(p.forward, p.backward, static_windows(pp, len(p.forward), p.num_split))
            for p in pipelines
        ]
    )


def pipeline_counts(pipelines: Sequence[PipelinePlan], shape: tuple[int, int]) -> IntArray:
    """Recomputed layers of all pipelines' chunks, [pp, chunks]."""
    counts = np.zeros(shape, dtype=np.int64)
    for pipeline in pipelines:
        counts[:, list(pipeline.forward)] = pipeline.recompute
    return counts


def join_schedules(pipelines: Sequence[ScheduleArrays]) -> ScheduleArrays:
    """Pipelines one after the other, as a plan of several groups runs them."""
    return ScheduleArrays(
        np.concatenate([p.operations for p in pipelines], axis=1),
        np.concatenate([p.forward for p in pipelines]),
        np.concatenate([p.backward for p in pipelines]),
    )


@dataclass(frozen=True, eq=False)
class SimulatedSchedule:
    """When every operation runs: `start_s` and `end_s` [pp, m] beside the operations."""

    schedule: ScheduleArrays
    start_s: FloatArray
    end_s: FloatArray
    busy_s: FloatArray
    makespan_s: float

    @property
    def bubble_ratio(self) -> float:
        """Idle time over makespan, averaged over stages."""
        available_s = self.makespan_s * self.busy_s.size
        return 1.0 - float(self.busy_s.sum()) / available_s if available_s else 0.0

    def timeline(self) -> Timeline:
        """As plain numbers; takes longer than the simulation."""
        starts, ends = self.start_s.tolist(), self.end_s.tolist()
        spans = tuple(
            Span(stage, op, chunk, start, end)
            for stage, row in enumerate(self.schedule.as_operations())
            for (op, chunk), start, end in zip(row, starts[stage], ends[stage], strict=False)
        )
        busy_s = self.busy_s.tolist()
        available_s = self.makespan_s * len(busy_s)
        bubble_ratio = 1.0 - sum(busy_s) / available_s if available_s else 0.0
        return Timeline(spans, self.makespan_s, bubble_ratio, tuple(busy_s))


def simulate_schedule(
    schedule: ScheduleArrays, costs: ChunkCosts, counts: IntArray | None = None
) -> SimulatedSchedule:
    """Timeline of one step in which stage p recomputes counts[p, k] layers of chunk k (none).

    `counts` are [pp, chunks], by chunk id. Operations of a stage run one after the other; what it
    sends costs it nothing, arrives p2p_s after the operation that made it, and is waited for only
    where it is consumed. Raises ScheduleError where the operations deadlock, where costs or counts
    have other shapes, or where there are no times of I and W.
    """
    num_chunks = costs.p2p_s.size
    layers = np.zeros((schedule.pp, num_chunks), dtype=np.int64) if counts is None else counts
    if schedule.num_ids > num_chunks:
        raise ScheduleError(
            f"the operations name chunk {schedule.num_ids - 1}, but there are times of {num_chunks}"
        )
    if schedule.is_split and (costs.input_s is None or costs.weight_s is None):
        raise ScheduleError("the operations have I and W, but only times of whole backwards")
    check_shape("recompute counts", layers, (schedule.pp, num_chunks))
    times = schedule_times(costs, layers)
    names = ("forward times", "backward times", "times of I", "times of W")
    for name, values in zip(names, times, strict=False):
        check_shape(name, values, (schedule.pp, num_chunks))
    start_s, end_s, busy_s, done = load_kernels().simulate_operations(schedule.operations, times)
    if done.min(initial=end_s.shape[1]) < end_s.shape[1]:
        raise ScheduleError(_describe_deadlock(schedule, done))
    makespan_s = float(end_s[:, -1].max()) if end_s.size else 0.0
    return SimulatedSchedule(schedule, start_s, end_s, busy_s, makespan_s)


def schedule_times(costs: ChunkCosts, counts: IntArray) -> Times:
    """What the compiled walks take; I and W are as long as B where they have no times."""
    whole = costs.input_s is None or costs.weight_s is None
    times: Times = load_kernels().Times(
        np.ascontiguousarray(costs.forward_s, dtype=np.float64),
        np.ascontiguousarray(costs.backward_s, dtype=np.float64),
        np.ascontiguousarray(costs.backward_s if whole else costs.input_s, dtype=np.float64),
        np.ascontiguousarray(costs.backward_s if whole else costs.weight_s, dtype=np.float64),
        np.ascontiguousarray(counts * costs.recompute_s, dtype=np.float64),
        np.ascontiguousarray(costs.p2p_s, dtype=np.float64),
    )
    return times


def check_shape(name: str, values: NDArray[Any], shape: tuple[int, int]) -> None:
    """Raise ScheduleError unless `values` have the shape: the kernels do not check bounds."""
    if values.shape != shape:
        raise ScheduleError(f"{name} have shape {values.shape}, [pp, chunks] is {shape}")


def stream_schedule(
    streams: Sequence[Sequence[Instruction]], num_chunks: int
) -> tuple[ScheduleArrays, IntArray]:
    """Operations of streams as `lower_plan` makes them, and their counts [pp, chunks].

    Raises ScheduleError where a send does not follow at once what it sends.
    """
    counts = np.zeros((len(streams), num_chunks), dtype=np.int64)
    rows: list[list[int]] = []
    for stage, stream in enumerate(streams):
        rows.append([])
        made = Instruction(Op.STEP)
        for instruction in stream:
            op, chunk = instruction.op, instruction.chunk
            if op.is_compute:
                made = instruction
                rows[-1].append(encode(op, chunk))
                if op.makes_gradient:
                    counts[stage, chunk] = instruction.recompute
            elif op in _SENDS and (made.chunk != chunk or made.op not in _SENDS[op]):
                raise ScheduleError(f"stage {stage}: {instruction} comes late, after {made}")
    length = max(map(len, rows), default=0)
    padded = [row + [NOTHING] * (length - len(row)) for row in rows]
    first = [decode(code) for code in rows[0]] if rows else []
    return ScheduleArrays(
        np.array(padded, dtype=np.int64).reshape(len(streams), length),
        np.array([chunk for op, chunk in first if op is Op.FORWARD], dtype=np.int64),
        np.array([chunk for op, chunk in first if op.makes_gradient], dtype=np.int64),
    ), counts


def encode(op: Op, chunk: int) -> int:
    """The code of plan/stream.py."""
    if op is Op.FORWARD:
        return chunk
    if op is Op.BACKWARD_WEIGHT:
        return SPLIT + chunk
    return -chunk - 1 if op is Op.BACKWARD else -SPLIT - chunk - 1


def decode(code: int) -> tuple[Op, int]:
    """Operation and chunk of a code of plan/stream.py, NOTHING apart."""
    if code >= SPLIT:
        return Op.BACKWARD_WEIGHT, code - SPLIT
    if code >= 0:
        return Op.FORWARD, code
    if code < -SPLIT:
        return Op.BACKWARD_INPUT, -code - 1 - SPLIT
    return Op.BACKWARD, -code - 1


def _describe_deadlock(schedule: ScheduleArrays, done: IntArray) -> str:
    length = schedule.operations.shape[1]
    stuck = [stage for stage in range(schedule.pp) if done[stage] < length]
    rows = []
    for stage in stuck[:_SHOWN_STAGES]:
        op, chunk = decode(int(schedule.operations[stage, done[stage]]))
        total = int((schedule.operations[stage] != NOTHING).sum())
        place = f"{op.value}{chunk} ({done[stage]} of {total} done)"
        rows.append(f"stage {stage} waits at {place}")
    return f"the operations deadlock with {len(stuck)} stages stuck: {'; '.join(rows)}"


def load_kernels() -> ModuleType:
    """Imported late: numba takes its time, and not all that import this file simulate."""
    from ds_infinipipe.planner.predict import kernels

    return kernels
