"""Timing a rank's compute, and how long it stands still for communication, by kind.

By the host's clock, or by events where a device runs behind it; neither waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch

__all__ = ["DeviceClock", "HostClock", "StepClock", "Wait", "WaitTimes", "make_clock"]


class StepClock(Protocol):
    """Marks taken during a step, turned into seconds since its start afterwards."""

    def mark(self) -> Any:
        """The present moment."""

    def seconds(self, mark: Any) -> float:
        """Seconds from the clock's making to a mark; may wait for the device."""


class HostClock:
    """For devices that compute as they are called; `now` reads the clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()

    def mark(self) -> float:
        return self._now()

    def seconds(self, mark: float) -> float:
        return mark - self._started


class DeviceClock:
    """For CUDA: events on the current stream, since the host only queues work.

    Nothing waits until `seconds` is called, which is after the step's last instruction.
    """

    def __init__(self) -> None:
        self._started = self.mark()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        mark.synchronize()
        return float(self._started.elapsed_time(mark)) / 1e3


def make_clock(device: torch.device) -> StepClock:
    """The clock for one step on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class Wait(str, Enum):
    """What is waited for."""

    TRANSFERS = "transfers"
    """Tensors of the neighbouring stages, also while those still compute them."""
    GATHERS = "gathers"
    """Parameters of the other ranks of the stage."""
    REDUCTIONS = "reductions"
    """Gradients on their way to their shards and to the other replicas."""
    ALL_TO_ALLS = "all_to_alls"
    """The exchange of tokens for heads before attention, and back."""


class WaitTimes:
    """One step's waits on this rank. On CUDA what the compute stream waits, read from events.

    Waits do not overlap each other, so their sum is no more than the step's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step's."""
        self._clock: StepClock = make_clock(self._device)
        self._marks: dict[Wait, list[tuple[Any, Any]]] = {kind: [] for kind in Wait}

    @contextmanager
    def during(self, kind: Wait) -> Iterator[None]:
        """Count what stands still in the body."""
        start = self._clock.mark()
        yield
        self._marks[kind].append((start, self._clock.mark()))

    def stopwatch(self, kind: Wait) -> _Stopwatch:
        """For waits whose start and stop are in different places, such as those of a backward."""
        return _Stopwatch(self, kind)

    def seconds(self) -> Mapping[Wait, float]:
        """By kind, up to now; waits for the device, so it is for the end of the step."""
        seconds = self._clock.seconds
        return {
            kind: sum(seconds(stop) - seconds(start) for start, stop in marks)
            for kind, marks in self._marks.items()
        }


class _Stopwatch:
    def __init__(self, waits: WaitTimes, kind: Wait) -> None:
        self._waits = waits
        self._kind = kind
        self._started: Any = None

    def start(self) -> None:
        self._started = self._waits._clock.mark()

    def stop(self) -> None:
        self._waits._marks[self._kind].append((self._started, self._waits._clock.mark()))
