"""When planning has to stop and take the best plan it has."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.predict.time import CostModel

__all__ = ["Deadline"]


class Deadline:
    """Seconds from its construction on; endless by default."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        self._started_s = time.perf_counter()

    @classmethod
    def of(cls, settings: PlannerSettings, lengths: Sequence[int], cost: CostModel) -> Deadline:
        """The deadline of `settings`; "auto" is the work of a step of these lengths.

        Beside training, a plan that takes no longer than the step before it costs nothing.
        """
        if settings.deadline_s is None:
            return cls()
        if settings.deadline_s == "auto":
            return cls(cost.total_time(sum(lengths), sum(n * n for n in lengths)))
        return cls(settings.deadline_s)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.limit_s - self.elapsed_s)

    @property
    def is_over(self) -> bool:
        return self.remaining_s <= 0.0
