"""The question every baseline answers, and its answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Layout, Setup

__all__ = ["PAPER", "TUNED", "BaselineResult", "Workload", "fastest", "infeasible"]

PAPER = "paper"
TUNED = "tuned"


@dataclass(frozen=True)
class Workload:
    """One batch to train on, and what with.

    Baselines with stages use the layout of `setup`; those without (DeepSpeed, FlexSP) and
    Megatron-LM use as many devices as it has. `other_layouts` of as many devices are open to what
    is tuned.
    """

    lengths: tuple[int, ...]
    setup: Setup
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    other_layouts: tuple[Layout, ...] = ()

    @property
    def variants(self) -> tuple[Workload, ...]:
        """The same batch on each layout that is open to tuning."""
        own = self.setup.layout
        setups = [self.setup]
        setups += [replace(self.setup, layout=o) for o in self.other_layouts if o != own]
        return tuple(replace(self, setup=setup, other_layouts=()) for setup in setups)

    @property
    def num_devices(self) -> int:
        return self.setup.layout.world_size

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """What a system would take for one step, under the planner's own cost and memory model.

    `configuration` is "paper" or "tuned"; `note` says what was chosen, or why nothing fits.
    Communication (not hidden) and recomputation are seconds of a step, mean over the devices;
    `peak_bytes` is that of the fullest device. All figures are 0 where `feasible` is False.
    """

    name: str
    configuration: str
    step_time_s: float
    tokens_per_s: float
    bubble_ratio: float
    communication_s: float
    recompute_s: float
    peak_bytes: int
    feasible: bool
    note: str


def infeasible(name: str, configuration: str, note: str) -> BaselineResult:
    return BaselineResult(name, configuration, 0.0, 0.0, 0.0, 0.0, 0.0, 0, False, note)


def fastest(results: Iterable[BaselineResult]) -> BaselineResult:
    """The fastest that is feasible, the first one where none is; ties go to the earlier."""
    listed = tuple(results)
    return min(
        listed,
        key=lambda r: (not r.feasible, r.step_time_s if r.feasible else 0.0, listed.index(r)),
    )
