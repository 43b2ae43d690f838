"""Which degrees to run a batch with: every (pp, sp, dp) is planned unless it cannot win.

One stage (pp = 1) is plain ZeRO-3 with Ulysses, data-parallel replicas beside it. The replicas of
dp > 1 get sub-batches of balanced predicted time and a plan each; they wait for the slowest and sum
their gradients once a step, as far as possible beside the last backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ds_infinipipe.errors import ConfigError, DataError, InfeasiblePlanError
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Layout, Setup, make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.replica_sum import GradientSums, step_time_s
from ds_infinipipe.planner.predict.schedule import shrinking_schedule, simulate_schedule
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.paper.chunking import chunk_sequences
from ds_infinipipe.planner.search.replicas import idle_plan, split_batch

__all__ = [
    "LayoutOutcome",
    "LayoutSearch",
    "LayoutStatus",
    "estimate_s",
    "plan_replicas",
    "possible_layouts",
    "search_layouts",
    "work_bound_s",
]

_REASONS_SHOWN = 2
_SLICE_COUNTS = (1, 4, 8, 16)


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
    setup: Setup,
    settings: PlannerSettings | None = None,
    num_devices: int | None = None,
) -> LayoutSearch:
    """Rank all layouts of `num_devices`, by default the cluster's, by predicted step time.

    Each takes the place of the layout in `setup`.

    A quick estimate of each layout decides the order and nothing else. One is left out only where
    its work, or the plan of one of its replicas, takes at least as long as the best so far.

    Raises DataError for a bad batch, ConfigError for a number of devices the cluster lacks,
    InfeasiblePlanError, with the reason of every layout, where none has a plan.
    """
    cluster = setup.cluster
    devices = cluster.num_devices if num_devices is None else num_devices
    if not 1 <= devices <= cluster.num_devices:
        raise ConfigError(
            f"{devices} devices asked for, cluster {cluster.name} has {cluster.num_devices}"
        )
    if not lengths:
        raise DataError("the batch is empty: a plan needs at least one sequence")
    search = _Search(tuple(lengths), setup, settings or PlannerSettings())
    outcomes: list[LayoutOutcome] = []
    hopeful: list[tuple[float, Layout]] = []
    for degrees in _factorizations(devices):
        try:
            layout = make_layout(setup.model, *degrees)
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

    def __init__(self, lengths: tuple[int, ...], setup: Setup, settings: PlannerSettings) -> None:
        self.lengths = lengths
        self.setup = setup
        self.settings = settings
        self.best_s = math.inf

    def estimate_s(self, layout: Layout) -> float:
        return estimate_s(self.lengths, replace(self.setup, layout=layout))

    def attempt(self, layout: Layout) -> LayoutOutcome:
        """Plan a layout unless it cannot be the best."""
        degrees = (layout.pp, layout.sp, layout.dp)
        setup = replace(self.setup, layout=layout)
        bound_s = work_bound_s(self.lengths, setup)
        if bound_s >= self.best_s:
            reason = f"at least {bound_s:.4g} s of work, the best takes {self.best_s:.4g} s"
            return LayoutOutcome(degrees, LayoutStatus.SLOWER, bound_s, reason=reason)
        plans: list[Plan] = []
        try:
            for plan in plan_replicas(self.lengths, setup, self.settings):
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


def plan_replicas(
    lengths: Sequence[int], setup: Setup, settings: PlannerSettings
) -> Iterator[Plan]:
    """A plan for each replica of the layout, one after the other; errors as of `plan_batch`."""
    dp = setup.layout.dp
    if dp == 1:
        shares: Sequence[Sequence[int]] = [range(len(lengths))]
    else:
        shares = split_batch(lengths, dp, CostModel(setup))
    for share in shares:
        if share or dp == 1:
            yield plan_batch([lengths[i] for i in share], setup, settings)
        else:
            yield idle_plan(setup, settings)


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


def work_bound_s(lengths: Sequence[int], setup: Setup) -> float:
    """No plan of this setup takes less: each stage's work, without any fixed cost, and its sum.

    Neither recomputation nor bubbles, latencies or gathers count. A replica has at least the mean
    work, and at least that of the longest sequence; what of the gradients' sum nothing hides comes
    on top.
    """
    cost, layout = CostModel(setup), setup.layout
    c, area_of = cost.coefficients, cost.area.before
    token_s = 3 * c.linear_s + 2 * c.all2all_s
    area_s = c.attention_forward_s + c.attention_backward_s
    sums = GradientSums.of(setup)

    def bound_s(tokens: float, area: float) -> float:
        layer_s = token_s * tokens + area_s * area
        stages = [layers * layer_s for layers in layout.stage_layers]
        stages[-1] += 3 * c.logits_s * tokens
        return max(work + sums.least_s(stage) for stage, work in enumerate(stages))

    area = math.fsum(area_of(int(n)) for n in lengths)
    longest = max(lengths, default=0)
    return max(
        bound_s(sum(lengths) / layout.dp, area / layout.dp), bound_s(longest, area_of(int(longest)))
    )


def estimate_s(lengths: Sequence[int], setup: Setup) -> float:
    """Simulated step of Algorithm 1's chunks without recomputation, best of a few slice counts.

    For the replica with the longest sequence. A plan may take less, with better chunks, or more,
    where memory binds; inf where not even the model states fit.
    """
    cost, memory, layout = CostModel(setup), MemoryModel(setup), setup.layout
    if max(memory.static_bytes) >= setup.limit_bytes:
        return math.inf
    share = _with_longest(lengths, layout, cost)
    times = []
    for k in _SLICE_COUNTS[: 1 if layout.pp == 1 else None]:
        chunks = chunk_sequences(share, k, cost, memory)
        schedule = shrinking_schedule(chunks, layout.pp)
        times.append(simulate_schedule(schedule, cost.chunk_costs(chunks)).makespan_s)
    return min(times) + GradientSums.of(setup).least_s(0)


def _with_longest(lengths: Sequence[int], layout: Layout, cost: CostModel) -> list[int]:
    """Lengths of the replica that has the longest sequence."""
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    shares = split_batch(lengths, layout.dp, cost)
    return [lengths[i] for i in next(share for share in shares if longest in share)]
