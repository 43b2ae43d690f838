"""Says, while a step stalls, which instruction this rank has been at and for how long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_infinipipe.runtime.engine import InfiniPipeEngine

__all__ = ["Activity", "Watchdog", "current_activity", "whereabouts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Activity:
    """What a rank is doing: a text with step, instruction and peers, and since when (monotonic)."""

    text: str
    since_s: float


def whereabouts(engine: InfiniPipeEngine) -> str:
    """A rank, its neighbours and its instruction, for an error or a warning."""
    step = engine.step_state
    place = "" if step is None else f"instruction {step.position} '{step.instruction}' of "
    return (
        f"rank {engine.global_rank} (stage {engine.stage_id}, sp rank {engine.sp_rank}) at "
        f"{place}step {engine.global_steps + 1}; its neighbours in the pipeline are ranks "
        f"{engine.channels.neighbours(engine.global_rank)}, its stage is ranks "
        f"{engine.grid.sequence_ranks}"
    )


def current_activity(engine: InfiniPipeEngine) -> Activity | None:
    """The instruction, or the recovery from a lack of memory, that a rank is at."""
    step = engine.step_state
    if step is None:
        return engine.recovery.activity
    return Activity(whereabouts(engine), step.entered_s)


class Watchdog:
    """A thread that logs a warning each time an activity has lasted another `patience_s`.

    `current` returns what the rank is doing, or None between steps. The thread only looks; the
    timeouts of the transfers end a stall.
    """

    def __init__(self, current: Callable[[], Activity | None], patience_s: float) -> None:
        self._current = current
        self._patience_s = patience_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        reported: tuple[float, int] | None = None
        while not self._stop.wait(self._patience_s / 4):
            activity = self._current()
            if activity is None:
                continue
            age_s = time.monotonic() - activity.since_s
            count = int(age_s / self._patience_s)
            if count > 0 and reported != (activity.since_s, count):
                reported = activity.since_s, count
                logger.warning("stalled for %.1f s: %s", age_s, activity.text)
