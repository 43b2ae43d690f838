"""The replicas' sum of gradients: what hides under the last backward, and what does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import setup_of

from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.links import replica_sum_s
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Layout, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op, Span, Timeline
from ds_infinipipe.planner.predict.replica_sum import (
    GradientSums,
    chain_end_s,
    settled_times,
    step_time_s,
)
from ds_infinipipe.planner.predict.schedule import shrinking_schedule, simulate_schedule
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel
from ds_infinipipe.planner.search.layouts import plan_replicas

MODEL = replace(BUILTIN_MODELS["llama-7b"], num_layers=8)
CLUSTER = load_cluster("a800-80g-2x8")
SETTINGS = PlannerSettings(max_slices=2, solver="greedy")


def plans_of(lengths: list[int], layout: Layout) -> list[Plan]:
    found = plan_replicas(lengths, setup_of(MODEL, layout, CLUSTER), SETTINGS)
    return list(found)


def tick_by_tick(ready: list[int], sums: list[int], own: int) -> int:
    """A link that serves one unit of work a tick: sum, own traffic, sum, own traffic, sum."""
    jobs: list[tuple[int, int]] = []
    for number, (start, length) in enumerate(zip(ready, sums, strict=True)):
        jobs += [(0, own)] * (number > 0) + [(start, length)]
    tick = 0
    for earliest, left in jobs:
        while left:
            left -= tick >= earliest
            tick += 1
        tick = max(tick, earliest)
    return tick


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(0, 4),
)
@examples(200)
def test_the_closed_form_is_a_link_served_tick_by_tick(
    units: list[tuple[int, int]], own: int
) -> None:
    ready, sums = sorted(start for start, _ in units), [length for _, length in units]
    closed = chain_end_s(np.array(ready, float), np.array(sums, float), float(own))
    assert closed == tick_by_tick(ready, sums, own)


def test_layers_are_final_one_after_the_other_the_recomputed_ones_last() -> None:
    # 3 layers of 2 s, the first of them recomputed in 1 s; head after its forward
    costs = ChunkCosts(
        forward_s=np.array([[4.0]]),
        backward_s=np.array([[6.0]]),
        recompute_s=np.array([1.0]),
        p2p_s=np.zeros(1),
    )
    spans = (Span(0, Op.FORWARD, 0, 0.0, 4.0), Span(0, Op.BACKWARD, 0, 5.0, 12.0))
    timeline = Timeline(spans, 12.0, 0.0, (11.0,))
    [times] = settled_times(timeline, costs, Layout(1, 1, 2, (3,)))
    assert times.tolist() == pytest.approx([4.0, 7.0, 9.0, 12.0, 12.0])


def test_weights_gradients_on_their_own_decide_where_they_come_last() -> None:
    costs = ChunkCosts(*(np.array([[6.0]]),) * 2, np.array([1.0]), np.zeros(1))
    halves = (Op.BACKWARD_INPUT, 4.0, 10.0), (Op.BACKWARD_WEIGHT, 11.0, 14.0)
    spans = [Span(0, op, 0, start, end) for op, start, end in [(Op.FORWARD, 0.0, 4.0), *halves]]
    timeline = Timeline(tuple(spans), 14.0, 0.0, (13.0,))
    [times] = settled_times(timeline, costs, Layout(1, 1, 2, (3,)))
    assert times.tolist() == pytest.approx([4.0, 12.0, 13.0, 14.0, 14.0])


def test_the_last_chunk_decides_when_gradients_are_final() -> None:
    [plan, _] = plans_of([9000] * 16, make_layout(MODEL, 2, 4, 2))
    timeline = forecast(plan)
    cost = CostModel(plan.setup)
    times = settled_times(timeline, cost.chunk_costs(plan.chunks), plan.layout)
    assert [len(stage) for stage in times] == [4 + 1, 1 + 4]
    for stage, ready in enumerate(times):
        last = Op.BACKWARD, Op.BACKWARD_WEIGHT
        ends = [s.end_s for s in timeline.spans if s.stage == stage and s.op in last]
        assert ready[-1] == pytest.approx(max(ends))
        assert (np.diff(ready) >= 0).all()


def test_one_replica_has_nothing_to_sum() -> None:
    layout = make_layout(MODEL, 2, 8)
    sums = GradientSums.of(setup_of(MODEL, layout, CLUSTER))
    assert all(not stage.any() for stage in sums.units_s)
    [plan] = plans_of([9000] * 8, layout)
    assert step_time_s([plan]) == plan.predicted.step_time_s


def test_all_gradients_of_a_stage_are_summed_once() -> None:
    layout = make_layout(MODEL, 2, 4, 2)
    sums = GradientSums.of(setup_of(MODEL, layout, CLUSTER))
    latency_s = 2 * CLUSTER.collective_latency_s
    for stage in sums.units_s:
        params = 4 * MODEL.layer_params + MODEL.embedding_params
        whole_s = replica_sum_s(4 * params / layout.sp, layout, CLUSTER)
        assert stage.sum() - whole_s == pytest.approx((len(stage) - 1) * latency_s)


def test_a_weight_tied_inside_a_stage_is_summed_with_the_embedding() -> None:
    tied = replace(MODEL, tied_embeddings=True)
    one = GradientSums.of(setup_of(tied, make_layout(tied, 1, 8, 2), CLUSTER)).units_s[0]
    assert one[0] == 0.0 and one[-1] > 0.0
    two = GradientSums.of(setup_of(tied, make_layout(tied, 2, 4, 2), CLUSTER)).units_s
    assert two[1][0] == two[0][-1] > 0.0


def test_nothing_hides_where_gradients_are_in_host_memory() -> None:
    layout = make_layout(MODEL, 1, 8, 2)
    sums = GradientSums.of(setup_of(MODEL, layout, CLUSTER, offloads_optimizer=True))
    assert sums.least_s(0) == pytest.approx(float(sums.units_s[0].sum()))


def test_states_cut_over_replicas_halve_the_sums_and_gather_the_weights() -> None:
    layout = make_layout(MODEL, 2, 4, 2)
    setup = setup_of(MODEL, layout, CLUSTER)
    cut = setup.run_with(shards_optimizer_over_dp=True)
    whole, halved = GradientSums.of(setup), GradientSums.of(cut)
    latency_s = 2 * CLUSTER.collective_latency_s
    for before, after in zip(whole.units_s, halved.units_s, strict=True):
        assert after - latency_s == pytest.approx((before - latency_s) / 2)
    total_s = float((halved.units_s[0] - latency_s).sum())
    # bf16 weights are half of the float32 gradients
    assert halved.gather_s - latency_s == pytest.approx(total_s / 2)
    assert whole.gather_s == 0.0
    ready = [tuple(np.zeros(units.size) for units in halved.units_s)]
    assert halved.step_time_s([1e3], ready) == pytest.approx(1e3 + halved.gather_s)
    assert halved.least_s(0) > halved.gather_s
    alone = GradientSums.of(replace(cut, layout=make_layout(MODEL, 2, 8)))
    assert alone.gather_s == 0.0


def test_only_the_last_unit_is_left_after_a_long_last_backward() -> None:
    layout = make_layout(MODEL, 1, 8, 2)
    plans = plans_of([40_000] * 4, layout)
    sums = GradientSums.of(setup_of(MODEL, layout, CLUSTER))
    makespan_s = max(plan.predicted.step_time_s for plan in plans)
    assert sums.units_s[0].sum() > 3 * sums.least_s(0)
    assert step_time_s(plans) - makespan_s == pytest.approx(sums.least_s(0))


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_a_step_lies_between_what_hides_best_and_no_hiding_at_all(overlap: float) -> None:
    slow = replace(CLUSTER, node_p2p_bandwidth=1e9, zero_overlap=overlap)
    layout = make_layout(MODEL, 2, 4, 2)
    settings = SETTINGS
    plans = list(plan_replicas([9000] * 4, setup_of(MODEL, layout, slow), settings))
    sums = GradientSums.of(setup_of(MODEL, layout, slow))
    makespan_s = max(plan.predicted.step_time_s for plan in plans)
    exposed_s = step_time_s(plans) - makespan_s
    total_s = float(sums.units_s[0].sum())
    assert sums.least_s(0) - 1e-9 <= exposed_s <= total_s + 1e-9
    assert (exposed_s == pytest.approx(total_s)) is (overlap == 0.0)


def test_more_replicas_never_end_earlier_and_idle_ones_do_not_matter() -> None:
    layout = make_layout(MODEL, 1, 4, 4)
    plans = plans_of([20_000, 9000, 5000], layout)
    times = [step_time_s(plans[: n + 1]) for n in range(4)]
    assert times == sorted(times)
    assert not plans[3].chunks and times[3] == times[2]


def test_the_sum_waits_where_the_stages_own_traffic_is_on_its_links() -> None:
    shared = GradientSums.of(setup_of(MODEL, make_layout(MODEL, 1, 4, 4), CLUSTER))
    apart = GradientSums.of(setup_of(MODEL, make_layout(MODEL, 1, 8, 2), CLUSTER))
    assert shared.own_s > 0.0 and apart.own_s == 0.0


def test_a_schedule_ends_when_its_timeline_says() -> None:
    layout = make_layout(MODEL, 2, 4, 2)
    setup = setup_of(MODEL, layout, CLUSTER)
    cost, sums = CostModel(setup), GradientSums.of(setup)
    chunks = [Chunk((Slice(i, 0, 4096 * (i % 3 + 1), True),)) for i in range(9)]
    costs = cost.chunk_costs(chunks)
    counts = np.arange(18).reshape(2, 9) % 5
    simulated = simulate_schedule(shrinking_schedule(chunks, 2), costs, counts)
    settled = settled_times(simulated.timeline(), costs, layout)
    expected = sums.step_time_s([simulated.makespan_s], [settled])
    assert sums.schedule_s(simulated, costs) == expected > simulated.makespan_s


def test_one_stage_runs_its_longest_backward_last() -> None:
    lengths = [40_000, 9000, 9000, 5000, 3000, 800] * 8
    setup = setup_of(MODEL, make_layout(MODEL, 1, 4, 4), CLUSTER)
    settings = SETTINGS.model_copy(update={"mode": "lean", "token_limit": 50_000})
    for plan in plan_replicas(lengths, setup, settings):
        spans = forecast(plan).spans
        backward_s = [s.end_s - s.start_s for s in spans if s.op is Op.BACKWARD]
        assert len(backward_s) > 1
        assert backward_s[-1] == pytest.approx(max(backward_s))
