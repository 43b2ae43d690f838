"""Models with sliding windows are planned by the areas they attend to, wherever a length counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import setup_of

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.area import AttentionArea, chunk_sizes
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.lean.assemble import lower_bound_s
from ds_infinipipe.planner.search.lean.candidates import CandidateSpace
from ds_infinipipe.planner.search.lean.one_stage import iterate_whole
from ds_infinipipe.planner.search.lean.packing import SortedBatch, StreamShape, cut_batch, join_bins
from ds_infinipipe.planner.search.paper.chunking import slice_mesh, thresholds

CLUSTER = load_cluster("h100-80g-4x8")
CAUSAL = ModelSpec("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000)
MISTRAL = replace(CAUSAL, sliding_window=4096, window_layers=32)
EVERY_OTHER = replace(MISTRAL, window_layers=16)
LENGTHS = [int(n) for n in sample_lengths("github-b", 128, 65536, np.random.default_rng(0))]


def plan(model: ModelSpec, pp: int, mode: str = "lean") -> Plan:
    settings = PlannerSettings.model_validate({"mode": mode})
    layout = make_layout(model, pp, 8)
    return plan_batch(LENGTHS, setup_of(model, layout, CLUSTER), settings)


def space(model: ModelSpec, pp: int, lengths: list[int]) -> CandidateSpace:
    layout, settings = make_layout(model, pp, 8), PlannerSettings()
    setup = setup_of(model, layout, CLUSTER)
    return CandidateSpace.of(lengths, CostModel(setup), MemoryModel(setup), settings)


@pytest.mark.parametrize("mode", ["lean", "paper"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("model", [MISTRAL, EVERY_OTHER])
def test_a_plan_states_the_time_of_its_own_streams(model: ModelSpec, pp: int, mode: str) -> None:
    found = plan(model, pp, mode)
    assert found.predicted.step_time_s == pytest.approx(forecast(found).makespan_s, rel=1e-12)


def test_a_window_is_worth_in_one_stage_what_it_saves_of_the_work() -> None:
    times, bounds = [], []
    for model in (MISTRAL, CAUSAL):
        cost = CostModel(setup_of(model, make_layout(model, 1, 8), CLUSTER))
        times.append(plan(model, 1).predicted.step_time_s)
        bounds.append(lower_bound_s(LENGTHS, cost))
    assert bounds[0] < 0.8 * bounds[1]
    # without bubbles all but a few fixed costs is work
    assert times[0] / bounds[0] < 1.05 and times[1] / bounds[1] < 1.05


@pytest.mark.parametrize("mode", ["lean", "paper"])
@pytest.mark.parametrize("pp", [1, 4])
def test_a_window_that_nothing_is_longer_than_changes_no_plan(pp: int, mode: str) -> None:
    widest = replace(CAUSAL, sliding_window=max(LENGTHS), window_layers=32)
    wide, causal = plan(widest, pp, mode), plan(CAUSAL, pp, mode)
    solver = replace(causal.solver, time_s=0.0)
    assert replace(wide.solver, time_s=0.0) == solver
    assert replace(wide, setup=causal.setup, solver=solver) == replace(causal, solver=solver)


@pytest.mark.parametrize("model", [CAUSAL, MISTRAL, EVERY_OTHER])
def test_candidates_have_the_times_of_their_chunks(model: ModelSpec) -> None:
    one, four = space(model, 1, LENGTHS), space(model, 4, LENGTHS)
    whole = [(one.cost, candidate) for candidate, _ in iterate_whole(one)]
    some = [(four.cost, four.candidate(k, 0.1, 40000, StreamShape(), 32)) for k in (1, 4)]
    assert whole and some
    for cost, candidate in whole + some:
        exact = cost.chunk_costs(candidate.packed.chunks(8))
        assert np.allclose(candidate.costs.forward_s, exact.forward_s, rtol=1e-12)
        assert np.allclose(candidate.costs.backward_s, exact.backward_s, rtol=1e-12)


@pytest.mark.parametrize("model", [CAUSAL, MISTRAL, EVERY_OTHER])
def test_the_time_threshold_of_algorithm_1_is_that_of_the_longest_slice(model: ModelSpec) -> None:
    layout = make_layout(model, 4, 8)
    setup = setup_of(model, layout, CLUSTER)
    cost, memory = CostModel(setup), MemoryModel(setup)
    ends = slice_mesh(65536, 4, cost, 8)
    area = AttentionArea.of(model).before
    longest_s = max(
        cost.total_time(end - start, area(end) - area(start))
        for start, end in zip((0, *ends[:-1]), ends, strict=True)
    )
    bounds = thresholds([512] * 100, ends, cost, memory)
    assert bounds.time_s == pytest.approx(longest_s, rel=1e-12)


@pytest.mark.parametrize("model", [CAUSAL, MISTRAL, EVERY_OTHER])
def test_a_typical_token_takes_its_part_of_a_sequence(model: ModelSpec) -> None:
    alike = space(model, 4, [20000] * 50)
    assert alike.typical_token_s == pytest.approx(float(alike.batch.work_s[0]) / 20000, rel=1e-6)


def test_padding_sees_a_window_too() -> None:
    area = AttentionArea(3, 1, 1)
    layout = make_layout(MISTRAL, 1, 8)
    cost = CostModel(setup_of(replace(MISTRAL, sliding_window=3), layout, CLUSTER))
    batch = SortedBatch.of([9, 17, 40], cost)
    uncut = cut_batch(batch, cost, np.inf, 100, 1, 8)
    packed = join_bins(batch, uncut, np.array([0, 1, 1]))
    found, exact = packed.padded_sizes(8, area), chunk_sizes(packed.chunks(8), area)
    assert [list(sizes) for sizes in found] == [list(sizes) for sizes in exact]
    with_padding = area.before(17) + area.before(9) + area.before(6)
    assert list(found[1]) == [area.before(40), with_padding]
