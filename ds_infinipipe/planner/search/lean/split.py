"""Backwards in two halves where stages wait: the second half, of the weights, fills the waits.

A stage sends the gradient of a chunk's input before it makes those of its weights, which only the
step's end needs. Between the halves lie bytes about as many as those of the chunk's activations, so
memory decides how many weights may be late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.plan.stream import NOTHING
from ds_infinipipe.planner.predict.schedule import (
    ScheduleArrays,
    schedule_times,
    simulate_schedule,
)
from ds_infinipipe.planner.search.deadline import Deadline
from ds_infinipipe.planner.search.lean.candidates import LeanChoice
from ds_infinipipe.planner.search.lean.stream import simulate_s

__all__ = ["split_choice"]

IntArray: TypeAlias = NDArray[np.int64]

_MOST_LEFT = (0, 1, 2, 4, 8, 1 << 30)
_SHARES = (0.5, 1.0)


def split_choice(choice: LeanChoice, limit_bytes: int, deadline: Deadline) -> LeanChoice:
    """The choice with some backwards split where that ends the step sooner, else the choice.

    Every way of `_schedules` is simulated until the deadline; peaks stay within the limit.
    """
    best = choice
    for schedule in _schedules(choice, limit_bytes):
        if deadline.is_over:
            break
        simulated = simulate_schedule(schedule, choice.candidate.costs, choice.counts)
        joined = replace(
            schedule,
            operations=_without_padding(
                _kernels().join_backwards(
                    schedule.operations,
                    simulated.start_s,
                    simulated.end_s,
                    choice.candidate.costs.p2p_s,
                )
            ),
        )
        takes_s = simulate_s(joined, choice.candidate.costs, choice.counts, choice.candidate.sums)
        if takes_s >= best.takes_s:
            continue
        if (choice.ledger.peaks(joined, choice.counts) <= limit_bytes).all():
            candidate = replace(choice.candidate, schedule=joined)
            best = replace(choice, candidate=candidate, takes_s=takes_s)
    return best


def _schedules(choice: LeanChoice, limit_bytes: int) -> Iterator[ScheduleArrays]:
    """Ways to fill waits: how many W's may be left, and how much of one must fit into a wait."""
    schedule, ledger = choice.candidate.schedule, choice.ledger
    times = schedule_times(choice.candidate.costs, choice.counts)
    amounts, transfers = ledger.amounts(is_split=True), _transfers_with_next(choice)
    counts = np.ascontiguousarray(choice.counts, dtype=np.int64)
    for most in _MOST_LEFT:
        for share in _SHARES:
            operations = _kernels().fill_waits(
                schedule.operations, times, amounts, transfers, counts, limit_bytes, most, share
            )
            yield replace(schedule, operations=_without_padding(operations))


def _transfers_with_next(choice: LeanChoice) -> IntArray:
    """Bytes in transfer beside every operation, and beside a W behind it: the next receive too."""
    schedule, hidden = choice.candidate.schedule, choice.ledger.hidden
    codes = schedule.operations
    stage = np.arange(codes.shape[0])[:, None]
    is_received = np.where(codes >= 0, stage > 0, stage + 1 < codes.shape[0])
    due = np.where(is_received, hidden[np.where(codes < 0, -codes - 1, codes)], 0)
    following = np.concatenate([due[:, 1:], np.zeros_like(due[:, :1])], axis=1)
    return np.asarray(choice.ledger.transfers(schedule) + following)


def _without_padding(operations: IntArray) -> IntArray:
    """Rows as long as the longest."""
    length = int((operations != NOTHING).sum(axis=1).max(initial=0))
    return np.ascontiguousarray(operations[:, :length])


def _kernels() -> ModuleType:
    from ds_infinipipe.planner.search.lean import split_kernels

    return split_kernels
