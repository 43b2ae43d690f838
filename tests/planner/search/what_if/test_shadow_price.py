"""What a GiB is worth: signs, words, and what happens at the ends."""

from __future__ import annotations

import numpy as np
import pytest
from planner_cases import tiny_setup

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout, make_setup
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.what_if.shadow_price import ShadowPrice, shadow_price

GIB = 2**30
LLAMA = BUILTIN_MODELS["llama-13b"]
A800 = BUILTIN_CLUSTERS["a800-80g-4x8"]


def plan_github(memory_gib: float) -> tuple[Plan, PlannerSettings]:
    settings = PlannerSettings(mode="paper")
    lengths = sample_lengths("github-b", 128, 65536, np.random.default_rng(2))
    setup = make_setup(LLAMA, A800, make_layout(LLAMA, 4, 8), memory_limit_gib=memory_gib)
    plan = plan_batch(lengths.tolist(), setup, settings)
    return plan, settings


def test_where_layers_are_recomputed_a_gib_more_saves_and_a_gib_less_costs() -> None:
    plan, settings = plan_github(15.0)
    assert any(any(map(any, p.recompute)) for p in plan.pipelines)
    price = shadow_price(plan, settings)
    assert price.base_s == plan.predicted.step_time_s
    assert price.saved_s > 0.0
    assert price.lost_s is not None
    assert price.lost_s > 0.0
    more, _ = plan_github(16.0)
    assert price.more_s == more.predicted.step_time_s
    assert str(price).startswith(f"memory     one more GiB saves {price.saved_s:.3g} s (")
    assert shadow_price(plan, settings) == price


def test_where_nothing_is_recomputed_more_memory_never_costs() -> None:
    plan, settings = plan_github(60.0)
    price = shadow_price(plan, settings)
    assert price.saved_s >= 0.0
    assert price.lost_s is not None
    assert 0.0 <= price.lost_s < 0.01 * price.base_s


def test_a_gib_less_than_there_is_does_not_fit() -> None:
    plan = plan_batch([300, 20], tiny_setup(4, 2, limit_bytes=GIB // 2))
    price = shadow_price(plan, PlannerSettings())
    assert price.lost_s is None
    assert str(price) == "memory     one more GiB saves nothing; one GiB less does not fit"


def test_a_limit_below_the_model_states_does_not_fit() -> None:
    plan, settings = plan_github(20.0)
    assert shadow_price(plan, settings, change_bytes=12 * GIB).less_s is None


@pytest.mark.parametrize(
    ("more_s", "less_s", "expected"),
    [
        (9.0, 12.0, "one more GiB saves 1 s (10.00%); one GiB less costs 2 s (20.00%)"),
        (10.0, 10.0, "one more GiB saves nothing; one GiB less costs nothing"),
        (
            10.0,
            9.5,
            "one more GiB saves nothing; one GiB less costs nothing: planning with it finds a plan "
            "0.5 s (5.00%) faster",
        ),
        (9.99, None, "one more GiB saves 0.01 s (0.10%); one GiB less does not fit"),
    ],
)
def test_the_price_in_words(more_s: float, less_s: float | None, expected: str) -> None:
    assert str(ShadowPrice(GIB, 10.0, more_s, less_s)) == f"memory     {expected}"
    assert str(ShadowPrice(GIB // 2, 10.0, 9.0, 12.0)) == (
        "memory     0.5 GiB more saves 1 s (10.00%); 0.5 GiB less costs 2 s (20.00%)"
    )
