"""Operation lists and their simulation as arrays: fast enough to try many candidates per batch.

What order.py, lower.py and simulate.py say in words, through the compiled kernels.py; results are
the same to the last bit. An operation is an int64, see codes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.codes import NOTHING, SPLIT
from ds_infinipipe.planner.costs import ChunkCosts
from ds_infinipipe.planner.order import (
    backward_order,
    count_slices,
    forward_order,
    shrinking_windows,
    slices_by_position,
    static_windows,
)
from ds_infinipipe.planner.types import Chunk, Op, Span, Timeline

__all__ = [
    "ScheduleArrays",
    "SimulatedSchedule",
    "build_schedule",
    "check_shape",
    "decode",
    "join_schedules",
    "load_kernels",
    "shrinking_schedule",
    "simulate_schedule",
    "static_schedule",
]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]

_SHOWN_STAGES = 8


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
        """The same as `simulate` returns; takes longer than the simulation."""
        starts, ends = self.start_s.tolist(), self.end_s.tolist()
        spans = tuple(
            Span(stage, op, chunk, start, end)
            for stage, row in enumerate(self.schedule.as_operations())
            for (op, chunk), start, end in zip(row, starts[stage], ends[stage], strict=False)
        )
        return Timeline(spans, self.makespan_s, self.bubble_ratio, tuple(self.busy_s.tolist()))


def simulate_schedule(
    schedule: ScheduleArrays, costs: ChunkCosts, counts: IntArray | None = None
) -> SimulatedSchedule:
    """Timeline of one step in which stage p recomputes counts[p, k] layers of chunk k (none).

    `counts` are [pp, chunks], by chunk id. Raises ScheduleError where the operations deadlock,
    where costs or counts have other shapes, or where there are no times of I and W.
    """
    shape = (schedule.pp, costs.p2p_s.size)
    layers = np.zeros(shape, dtype=np.int64) if counts is None else counts
    if schedule.num_ids > shape[1]:
        raise ScheduleError(
            f"the operations name chunk {schedule.num_ids - 1}, but there are times of {shape[1]}"
        )
    input_s, weight_s = costs.input_s, costs.weight_s
    if input_s is None or weight_s is None:
        if schedule.is_split:
            raise ScheduleError("the operations have I and W, but only times of whole backwards")
        input_s = weight_s = costs.backward_s
    for name, values in (
        ("forward times", costs.forward_s),
        ("backward times", costs.backward_s),
        ("times of I", input_s),
        ("times of W", weight_s),
        ("recompute counts", layers),
    ):
        check_shape(name, values, shape)
    start_s, end_s, busy_s, done = load_kernels().simulate_operations(
        schedule.operations,
        np.ascontiguousarray(costs.forward_s, dtype=np.float64),
        np.ascontiguousarray(costs.backward_s, dtype=np.float64),
        np.ascontiguousarray(input_s, dtype=np.float64),
        np.ascontiguousarray(weight_s, dtype=np.float64),
        np.ascontiguousarray(layers * costs.recompute_s, dtype=np.float64),
        np.ascontiguousarray(costs.p2p_s, dtype=np.float64),
    )
    if done.min(initial=end_s.shape[1]) < end_s.shape[1]:
        raise ScheduleError(_describe_deadlock(schedule, done))
    makespan_s = float(end_s[:, -1].max()) if end_s.size else 0.0
    return SimulatedSchedule(schedule, start_s, end_s, busy_s, makespan_s)


def check_shape(name: str, values: NDArray[Any], shape: tuple[int, int]) -> None:
    """Raise ScheduleError unless `values` have the shape: the kernels do not check bounds."""
    if values.shape != shape:
        raise ScheduleError(f"{name} have shape {values.shape}, [pp, chunks] is {shape}")


def decode(code: int) -> tuple[Op, int]:
    """Operation and chunk of a code of codes.py, NOTHING apart."""
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
    """Imported late: numba takes its time, and paper mode does not need it."""
    from ds_infinipipe.planner import kernels

    return kernels
