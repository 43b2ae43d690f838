"""What memory is worth: the step time with a little more and a little less of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_infinipipe.errors import InfeasiblePlanError
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.search.batch import plan_batch

__all__ = ["ShadowPrice", "shadow_price"]

_GIB = 2**30
_SAME = 1e-6  # relative; times closer than this are called equal


@dataclass(frozen=True)
class ShadowPrice:
    """Predicted step times at the limit, `change_bytes` above and below it.

    `more_s` is never above `base_s`, as a plan that fits also fits into more memory. `less_s` is
    None where nothing fits; `found_less_s` is what planning with less memory came to, which can be
    below `base_s`, since planning is a heuristic: then the plan itself can be improved.
    """

    change_bytes: int
    base_s: float
    more_s: float
    found_less_s: float | None

    @property
    def saved_s(self) -> float:
        """What `change_bytes` more saves, at least 0."""
        return self.base_s - self.more_s

    @property
    def less_s(self) -> float | None:
        return None if self.found_less_s is None else max(self.base_s, self.found_less_s)

    @property
    def lost_s(self) -> float | None:
        """What `change_bytes` less costs, at least 0; None where nothing fits."""
        return None if self.less_s is None else self.less_s - self.base_s

    def __str__(self) -> str:
        amount = f"{self.change_bytes / _GIB:.4g} GiB"
        one = "one GiB" if self.change_bytes == _GIB else amount
        more = "one more GiB" if self.change_bytes == _GIB else f"{amount} more"
        gained = f"saves {self._seconds(self.saved_s)}"
        if self.saved_s <= _SAME * self.base_s:
            gained = "saves nothing"
        if self.lost_s is None or self.found_less_s is None:
            lost = "does not fit"
        elif self.lost_s > _SAME * self.base_s:
            lost = f"costs {self._seconds(self.lost_s)}"
        elif self.found_less_s < self.base_s * (1 - _SAME):
            faster_s = self.base_s - self.found_less_s
            lost = f"costs nothing: planning with it finds a plan {self._seconds(faster_s)} faster"
        else:
            lost = "costs nothing"
        return f"memory     {more} {gained}; {one} less {lost}"

    def _seconds(self, change_s: float) -> str:
        return f"{change_s:.3g} s ({change_s / self.base_s:.2%})"


def shadow_price(
    plan: Plan,
    settings: PlannerSettings,
    *,
    change_bytes: int = _GIB,
) -> ShadowPrice:
    """Plan the same batch again with `change_bytes` more and less memory, all else equal.

    `settings` are those that `plan` was made with. Deterministic as planning is, so without a
    deadline.
    """
    base_s = plan.predicted.step_time_s
    limit_bytes = plan.setup.limit_bytes
    richer = replace(plan.setup, limit_bytes=limit_bytes + change_bytes)
    more = plan_batch(plan.lengths, richer, settings)
    found_less_s: float | None = None
    if limit_bytes > change_bytes:
        try:
            poorer = replace(plan.setup, limit_bytes=limit_bytes - change_bytes)
            less = plan_batch(plan.lengths, poorer, settings)
            found_less_s = less.predicted.step_time_s
        except InfeasiblePlanError:
            found_less_s = None
    return ShadowPrice(change_bytes, base_s, min(base_s, more.predicted.step_time_s), found_less_s)
