"""Layout search: every layout is planned, or there is a reason why not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import setup_of

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import ConfigError, DataError, InfeasiblePlanError
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.predict.replica_sum import step_time_s
from ds_infinipipe.planner.search.layouts import (
    LayoutStatus,
    plan_replicas,
    possible_layouts,
    search_layouts,
    work_bound_s,
)

MODEL = BUILTIN_MODELS["llama-7b"]
CLUSTER = load_cluster("a800-80g-2x4")
ANY_LAYOUT = setup_of(MODEL, make_layout(MODEL, 1, 1), CLUSTER)
SETTINGS = PlannerSettings(max_slices=4, solver="greedy")


def batch(name: str = "github-b", num_sequences: int = 32, context: int = 16384) -> list[int]:
    rng = np.random.default_rng(5)
    return [int(n) for n in sample_lengths(name, num_sequences, context, rng)]


def test_every_factorization_is_answered() -> None:
    search = search_layouts(batch(), ANY_LAYOUT, SETTINGS)
    assert sorted(o.degrees for o in search.ranking) == sorted(
        (pp, sp, 8 // (pp * sp)) for pp in (1, 2, 4, 8) for sp in (1, 2, 4, 8) if pp * sp <= 8
    )
    for outcome in search.ranking:
        assert (outcome.status is LayoutStatus.PLANNED) == bool(outcome.plans)
        assert bool(outcome.reason) != bool(outcome.plans)


def test_the_best_is_never_slower_than_any_layout_planned_alone() -> None:
    lengths = batch()
    search = search_layouts(lengths, ANY_LAYOUT, SETTINGS)
    for layout in possible_layouts(MODEL, 8):
        try:
            plans = list(plan_replicas(lengths, setup_of(MODEL, layout, CLUSTER), SETTINGS))
        except InfeasiblePlanError:
            continue
        step_s = step_time_s(plans)
        assert search.best.step_time_s <= step_s * (1 + 1e-12)
        assert work_bound_s(lengths, setup_of(MODEL, layout, CLUSTER)) <= step_s


def test_planned_layouts_come_first_and_fastest_first() -> None:
    ranking = search_layouts(batch(), ANY_LAYOUT, SETTINGS).ranking
    times = [outcome.step_time_s for outcome in ranking]
    assert times == sorted(times)
    assert times[0] < math.inf


def test_replicas_share_the_whole_batch() -> None:
    lengths = batch()
    layout = make_layout(MODEL, 1, 4, 2)
    plans = list(plan_replicas(lengths, setup_of(MODEL, layout, CLUSTER), SETTINGS))
    assert len(plans) == 2
    assert sorted(n for plan in plans for n in plan.lengths) == sorted(lengths)
    times = [plan.predicted.step_time_s for plan in plans]
    assert max(times) < 1.3 * min(times)


def test_a_replica_without_a_sequence_idles() -> None:
    layout = make_layout(MODEL, 1, 4, 2)
    plans = list(plan_replicas([5000], setup_of(MODEL, layout, CLUSTER), SETTINGS))
    assert [len(plan.lengths) for plan in plans] == [1, 0]


def test_impossible_degrees_are_named_with_the_reason() -> None:
    model = replace(MODEL, num_layers=2, num_kv_heads=4)
    search = search_layouts([512] * 8, replace(ANY_LAYOUT, model=model), SETTINGS)
    reasons = {o.degrees: o for o in search.ranking if o.status is LayoutStatus.IMPOSSIBLE}
    assert set(reasons) == {(4, 1, 2), (4, 2, 1), (8, 1, 1)}
    assert "pp 4 is more than the 2 layers" in reasons[4, 1, 2].reason


def test_no_layout_at_all_is_infeasible_and_says_why() -> None:
    small = replace(ANY_LAYOUT, limit_bytes=2**30)
    with pytest.raises(InfeasiblePlanError, match=r"none of 10 layouts of 8 devices .* alone"):
        search_layouts(batch(), small)


@pytest.mark.parametrize("devices", [0, 9])
def test_devices_the_cluster_lacks_are_refused(devices: int) -> None:
    with pytest.raises(ConfigError, match=f"{devices} devices asked for"):
        search_layouts([100], ANY_LAYOUT, num_devices=devices)


@pytest.mark.parametrize("lengths", [[], [5, 0]])
def test_a_bad_batch_is_refused(lengths: list[int]) -> None:
    with pytest.raises(DataError):
        search_layouts(lengths, ANY_LAYOUT, SETTINGS)


def test_equal_input_gives_an_equal_ranking() -> None:
    searches = [search_layouts(batch(), ANY_LAYOUT, SETTINGS) for _ in range(2)]
    digests = [[[p.digest() for p in o.plans] for o in s.ranking] for s in searches]
    assert digests[0] == digests[1]
