"""How many decoder layers each stage holds: fewer on the last where the logits weigh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_infinipipe.errors import ConfigError, InfeasiblePlanError
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Layout, Setup
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.lean.assemble import lower_bound_s

__all__ = ["balanced_layers", "choose_layers", "with_stage_layers"]


def with_stage_layers(layout: Layout, model: ModelSpec, stage_layers: Sequence[int]) -> Layout:
    """The layout with these layers per stage.

    Raises ConfigError unless there are pp of them, each at least 1, the model's layers in all.
    """
    if len(stage_layers) != layout.pp or min(stage_layers, default=0) < 1:
        raise ConfigError(
            f"stage layers {list(stage_layers)} must give each of the {layout.pp} stages at least "
            "one layer"
        )
    if sum(stage_layers) != model.num_layers:
        raise ConfigError(
            f"stage layers {list(stage_layers)} are {sum(stage_layers)} in all, {model.name} has "
            f"{model.num_layers}"
        )
    return replace(layout, stage_layers=tuple(int(layers) for layers in stage_layers))


def balanced_layers(lengths: Sequence[int], setup: Setup) -> Layout:
    """Layers with which the most loaded stage has least work, the loss included.

    The other stages share what the last one does not hold evenly, one more for the later of them,
    which hold fewer chunks at a time. Of equal splits the last stage gets most layers.
    """
    layout, num_layers = setup.layout, setup.model.num_layers
    if layout.pp == 1:
        return layout

    def bound_s(split: Layout) -> float:
        return lower_bound_s(lengths, CostModel(replace(setup, layout=split)))

    lasts = range(num_layers // layout.pp, 0, -1)
    return min((_split(layout, num_layers, last) for last in lasts), key=bound_s)


def choose_layers(lengths: Sequence[int], setup: Setup, settings: PlannerSettings) -> Layout:
    """The setup's own or the balanced layers, whichever has the faster plan; its own in a tie.

    Raises InfeasiblePlanError where neither has a plan.
    """
    balanced = balanced_layers(lengths, setup)
    if balanced == setup.layout:
        return balanced
    best: tuple[float, Layout] | None = None
    failure: InfeasiblePlanError | None = None
    for tried in (setup.layout, balanced):
        try:
            plan = plan_batch(lengths, replace(setup, layout=tried), settings)
        except InfeasiblePlanError as error:
            failure = failure or error
            continue
        if best is None or plan.predicted.step_time_s < best[0]:
            best = plan.predicted.step_time_s, tried
    if best is None:
        assert failure is not None
        raise failure
    return best[1]


def _split(layout: Layout, num_layers: int, last: int) -> Layout:
    base, spare = divmod(num_layers - last, layout.pp - 1)
    others = tuple(base + (layout.pp - 2 - stage < spare) for stage in range(layout.pp - 1))
    return replace(layout, stage_layers=(*others, last))
