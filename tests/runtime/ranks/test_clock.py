"""Timing of instructions by the host, and by events that are read only afterwards."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from ds_infinipipe.runtime.ranks.clock import DeviceClock, HostClock, make_clock


class _Event:
    """Stands for torch.cuda.Event: records a number, and may be read only once synchronised."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.is_ready = False

    def record(self) -> None:
        _Event.now_ms += 250.0
        self.at_ms = _Event.now_ms

    def synchronize(self) -> None:
        self.is_ready = True

    def elapsed_time(self, other: _Event) -> float:
        assert other.is_ready
        return other.at_ms - self.at_ms


def test_the_host_clock_counts_from_its_making() -> None:
    clock = HostClock()
    time.sleep(0.02)
    mark = clock.mark()
    assert 0.02 <= clock.seconds(mark) < 5.0


def test_the_device_clock_reads_its_events_in_seconds_after_waiting_for_them() -> None:
    with mock.patch.object(torch.cuda, "Event", _Event):
        clock = DeviceClock()
        first, second = clock.mark(), clock.mark()
    assert not second.is_ready
    assert clock.seconds(first) == pytest.approx(0.25)
    assert clock.seconds(second) == pytest.approx(0.5)


def test_only_cuda_is_timed_by_events() -> None:
    assert isinstance(make_clock(torch.device("cpu")), HostClock)
