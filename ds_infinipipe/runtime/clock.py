"""Timing compute instructions: by the host's clock, or by events where a device runs behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["DeviceClock", "HostClock", "StepClock", "make_clock"]


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
