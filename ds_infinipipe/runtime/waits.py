"""How long a rank's compute stands still for communication, by kind, without extra waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from ds_infinipipe.runtime.clock import StepClock, make_clock

__all__ = ["Wait", "WaitTimes"]


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
