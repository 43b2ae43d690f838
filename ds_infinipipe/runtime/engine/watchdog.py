"""Says, while a step stalls, which instruction this rank has been at and for how long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.stage.step import StepRun

__all__ = ["Activity", "Watchdog", "Whereabouts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Activity:
    """What a rank is doing: a text with step, instruction and peers, and since when (monotonic)."""

    text: str
    since_s: float


@dataclass(frozen=True)
class Whereabouts:
    """A rank, its neighbours and its instruction, for an error or a warning."""

    rank: Rank
    step: int
    """Number of the step under way, from 1."""
    run: StepRun | None
    """That step or an evaluation, None between them."""

    def __str__(self) -> str:
        rank, run = self.rank, self.run
        place = "" if run is None else f"instruction {run.position} '{run.instruction}' of "
        return (
            f"rank {rank.global_rank} (stage {rank.stage}, sp rank {rank.sp_rank}) at "
            f"{place}step {self.step}; its neighbours in the pipeline are ranks "
            f"{list(rank.neighbours)}, its stage is ranks {list(rank.stage_ranks)}"
        )


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
