"""Which degrees to run a batch with: every (pp, sp, dp) is planned unless it cannot win.

One stage (pp = 1) is plain ZeRO-3 with Ulysses, data-parallel replicas beside it. The replicas of
dp > 1 get sub-batches of balanced predicted time and a plan each; they wait for the slowest and sum
their gradients once a step, as far as possible beside the last backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ds_infinipipe.errors import ConfigError, DataError, InfeasiblePlanError
from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.gradient_sum import step_time_s
from ds_infinipipe.planner.layout_bounds import estimate_s, work_bound_s
from ds_infinipipe.planner.replicas import idle_plan, split_batch
from ds_infinipipe.planner.search import plan_batch
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import ClusterSpec, Layout, ModelSpec, make_layout
from ds_infinipipe.planner.types import Plan

__all__ = [
    "LayoutOutcome",
    "LayoutSearch",
    "LayoutStatus",
    "plan_replicas",
    "possible_layouts",
    "search_layouts",
]


_REASONS_SHOWN = 2


class LayoutStatus(str, Enum):
    """How far a layout got."""

    PLANNED = "planned"
    SLOWER = "slower"
    """Not planned to the end: what is known of it takes longer than the best."""
    INFEASIBLE = "infeasible"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True)
class LayoutOutcome:
    """One layout with its predicted step, or why it has none.

    `step_time_s` has what is left of the gradients' sum after the last backward. Both times are inf
    where there is no plan, except that `bound_s` holds for every possible layout. `plans` has one
    for each replica.
    """

    degrees: tuple[int, int, int]
    status: LayoutStatus
    bound_s: float = math.inf
    step_time_s: float = math.inf
    reason: str = ""
    plans: tuple[Plan, ...] = ()

    @property
    def bubble_ratio(self) -> float:
        """Idle share of all devices, those of early replicas included."""
        slowest_s = max(plan.predicted.step_time_s for plan in self.plans)
        busy = [p.predicted.step_time_s * (1 - p.predicted.bubble_ratio) for p in self.plans]
        return (slowest_s - sum(busy) / len(busy)) / self.step_time_s

    @property
    def peak_bytes(self) -> int:
        return max(max(plan.predicted.peak_bytes) for plan in self.plans)


@dataclass(frozen=True)
class LayoutSearch:
    """All layouts, the planned ones first and fastest first."""

    ranking: tuple[LayoutOutcome, ...]

    @property
    def best(self) -> LayoutOutcome:
        return self.ranking[0]


def search_layouts(
    lengths: Sequence[int],
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    settings: PlannerSettings | None = None,
    zero_stage: int = 3,
    num_devices: int | None = None,
) -> LayoutSearch:
    """Rank all layouts of `num_devices`, by default the cluster's, by predicted step time.

    A quick estimate of each layout decides the order and nothing else. One is left out only where
    its work, or the plan of one of its replicas, takes at least as long as the best so far.

    Raises DataError for a bad batch, ConfigError for a number of devices the cluster lacks,
    InfeasiblePlanError, with the reason of every layout, where none has a plan.
    """
    settings = settings or PlannerSettings()
    devices = cluster.num_devices if num_devices is None else num_devices
    if not 1 <= devices <= cluster.num_devices:
        raise ConfigError(
            f"{devices} devices asked for, cluster {cluster.name} has {cluster.num_devices}"
        )
    if not lengths:
        raise DataError("the batch is empty: a plan needs at least one sequence")
    search = _Search(tuple(lengths), model, cluster, settings, zero_stage)
    outcomes: list[LayoutOutcome] = []
    hopeful: list[tuple[float, Layout]] = []
    for degrees in _factorizations(devices):
        try:
            layout = make_layout(model, *degrees)
        except ConfigError as error:
            outcomes.append(LayoutOutcome(degrees, LayoutStatus.IMPOSSIBLE, reason=str(error)))
            continue
        hopeful.append((search.estimate_s(layout), layout))
    for _, layout in sorted(hopeful, key=lambda h: (h[0], h[1].pp, h[1].sp)):
        outcomes.append(search.attempt(layout))
    order = list(LayoutStatus)
    ranking = sorted(
        outcomes, key=lambda o: (order.index(o.status), o.step_time_s, o.bound_s, o.degrees)
    )
    if ranking[0].status is not LayoutStatus.PLANNED:
        raise _no_layout(ranking, devices)
    return LayoutSearch(tuple(ranking))


def _no_layout(ranking: Sequence[LayoutOutcome], devices: int) -> InfeasiblePlanError:
    """Names the first few: the most work-efficient ones, which it helps most to make fit."""
    shown = ranking[:_REASONS_SHOWN]
    reasons = "; ".join(f"{_name(outcome.degrees)}: {outcome.reason}" for outcome in shown)
    more = f"; and {len(ranking) - len(shown)} more" if len(ranking) > len(shown) else ""
    return InfeasiblePlanError(
        f"none of {len(ranking)} layouts of {devices} devices has a plan for this batch. "
        f"{reasons}{more}"
    )


class _Search:
    """The question, and the best time so far."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        model: ModelSpec,
        cluster: ClusterSpec,
        settings: PlannerSettings,
        zero_stage: int,
    ) -> None:
        self.lengths = lengths
        self.model = model
        self.cluster = cluster
        self.settings = settings
        self.zero_stage = zero_stage
        self.best_s = math.inf

    def estimate_s(self, layout: Layout) -> float:
        return estimate_s(
            self.lengths, self.model, self.cluster, layout, self.settings, self.zero_stage
        )

    def attempt(self, layout: Layout) -> LayoutOutcome:
        """Plan a layout unless it cannot be the best."""
        degrees = (layout.pp, layout.sp, layout.dp)
        bound_s = work_bound_s(self.lengths, self.model, self.cluster, layout, self.zero_stage)
        if bound_s >= self.best_s:
            reason = f"at least {bound_s:.4g} s of work, the best takes {self.best_s:.4g} s"
            return LayoutOutcome(degrees, LayoutStatus.SLOWER, bound_s, reason=reason)
        plans: list[Plan] = []
        try:
            for plan in self._replicas(layout):
                plans.append(plan)
                so_far_s = step_time_s(plans)
                if so_far_s >= self.best_s and len(plans) < layout.dp:
                    reason = f"a replica takes {so_far_s:.4g} s, the best {self.best_s:.4g} s"
                    return LayoutOutcome(degrees, LayoutStatus.SLOWER, bound_s, reason=reason)
        except InfeasiblePlanError as error:
            return LayoutOutcome(degrees, LayoutStatus.INFEASIBLE, bound_s, reason=str(error))
        takes_s = step_time_s(plans)
        self.best_s = min(self.best_s, takes_s)
        return LayoutOutcome(degrees, LayoutStatus.PLANNED, bound_s, takes_s, plans=tuple(plans))

    def _replicas(self, layout: Layout) -> Iterator[Plan]:
        return plan_replicas(
            self.lengths,
            model=self.model,
            cluster=self.cluster,
            layout=layout,
            settings=self.settings,
            zero_stage=self.zero_stage,
        )


def plan_replicas(
    lengths: Sequence[int],
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: Layout,
    settings: PlannerSettings,
    zero_stage: int = 3,
) -> Iterator[Plan]:
    """A plan for each replica of the layout, one after the other; errors as of `plan_batch`."""
    if layout.dp == 1:
        shares: Sequence[Sequence[int]] = [range(len(lengths))]
    else:
        shares = split_batch(lengths, layout.dp, CostModel(model, cluster, layout, zero_stage))
    for share in shares:
        if share or layout.dp == 1:
            yield plan_batch(
                [lengths[i] for i in share],
                model=model,
                cluster=cluster,
                layout=layout,
                settings=settings,
                zero_stage=zero_stage,
            )
        else:
            yield idle_plan(
                model=model,
                cluster=cluster,
                layout=layout,
                settings=settings,
                zero_stage=zero_stage,
            )


def _factorizations(devices: int) -> Iterator[tuple[int, int, int]]:
    """All (pp, sp, dp) whose product is `devices`."""
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    for pp in divisors:
        for sp in divisors:
            if devices % (pp * sp) == 0:
                yield pp, sp, devices // (pp * sp)


def possible_layouts(model: ModelSpec, devices: int) -> tuple[Layout, ...]:
    """Every layout of so many devices that the model's layers and heads allow."""
    layouts = []
    for degrees in _factorizations(devices):
        try:
            layouts.append(make_layout(model, *degrees))
        except ConfigError:
            continue
    return tuple(layouts)


def _name(degrees: tuple[int, int, int]) -> str:
    return "pp {}, sp {}, dp {}".format(*degrees)
