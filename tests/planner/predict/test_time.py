"""Each equation of the cost model by hand: rates are round numbers, so times are too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planner_cases import setup_of

from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS, ClusterSpec
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS, ModelSpec
from ds_infinipipe.planner.facts.setup import Layout, Setup, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.area import CAUSAL, chunk_sizes
from ds_infinipipe.planner.predict.time import CostModel

# layer weights: 2 * 8 * (8 + 8) + 3 * 8 * 16 = 640
MODEL = ModelSpec("toy", 4, 8, 16, 2, 2, 4, 32)
LAYOUT = Layout(2, 2, 1, (2, 2))
CLUSTER = ClusterSpec(
    name="toy",
    num_nodes=2,
    devices_per_node=2,
    memory_bytes=1 << 20,
    peak_flops=1000.0,
    linear_efficiency=0.64,
    attention_forward_efficiency=0.5,
    attention_backward_efficiency=0.25,
    gather_bandwidth=64.0,
    all2all_bandwidth=16.0,
    node_p2p_bandwidth=32.0,
    collective_latency_s=0.25,
    p2p_latency_s=0.5,
    layer_overhead_forward_s=3.0,
    layer_overhead_backward_s=5.0,
)
SPLIT = Chunk((Slice(0, 10, 6, False),))
PADDED = Chunk((Slice(1, 0, 3, True), Slice(2, 0, 2, True)), padding=3)


def toy_setup(layout: Layout = LAYOUT, cluster: ClusterSpec = CLUSTER, **changes: Any) -> Setup:
    """Query, key and value are exchanged apart."""
    return setup_of(MODEL, layout, cluster, **{"joins_qkv": False, **changes})


def layer_forward(tokens: int, area: int) -> float:
    """Worked from the numbers above: gather 10 s hidden under compute where it can be."""
    compute = 1.0 * tokens + 0.016 * area + 3.0
    return max(compute, 10.0) + 1.0 * tokens + 1.0


def layer_backward(tokens: int, area: int) -> float:
    compute = 2.0 * tokens + 0.08 * area + 5.0
    return max(compute, 20.0) + 1.0 * tokens + 1.0


def test_eq_1_coefficients_are_flops_over_rates() -> None:
    c = CostModel(toy_setup()).coefficients
    assert c.linear_s == pytest.approx(1.0)  # 2 * 640 flop / (1000 * 0.64 * 2 ranks)
    assert c.attention_forward_s == pytest.approx(0.016)  # 2 * 8 / (1000 * 0.5 * 2)
    assert c.attention_backward_s == pytest.approx(0.08)  # 2.5 * 2 * 8 / (1000 * 0.25 * 2)
    assert (c.overhead_forward_s, c.overhead_backward_s) == (3.0, 5.0)


def test_eq_3_all_to_all_moves_query_output_key_and_value_once_each() -> None:
    c = CostModel(toy_setup()).coefficients
    # 2 bytes * (2 * 8 + 2 * 8) / 2 ranks * 1/2 leaves = 16 bytes per token at 16 bytes/s
    assert c.all2all_s == pytest.approx(1.0)
    assert c.latency_s == pytest.approx(4 * 0.25)


def test_joined_query_key_and_value_have_one_latency_and_move_as_much() -> None:
    joined = CostModel(toy_setup(joins_qkv=True)).coefficients
    separate = CostModel(toy_setup()).coefficients
    assert joined.latency_s == pytest.approx(2 * 0.25)
    assert joined.all2all_s == separate.all2all_s


def test_eq_4_total_is_forward_and_backward_of_the_average_stage() -> None:
    cost = CostModel(toy_setup())
    assert cost.total_time(6, 156) == pytest.approx(
        2 * (layer_forward(6, 156) + layer_backward(6, 156))
    )
    assert cost.backward_time(6, 156) == pytest.approx(2 * layer_backward(6, 156))


def test_eq_4_counts_the_mean_of_uneven_stages() -> None:
    uneven = CostModel(toy_setup(layout=Layout(2, 2, 1, (3, 1))))
    assert uneven.total_time(6, 156) == CostModel(toy_setup()).total_time(6, 156)
    forward = uneven.chunk_costs([SPLIT]).forward_s
    assert forward[0, 0] == pytest.approx(3 * layer_forward(6, 156))


def test_eq_1_chunk_times_use_the_area_with_context_and_count_padding() -> None:
    costs = CostModel(toy_setup()).chunk_costs([SPLIT, PADDED])
    area_split, area_padded = 16**2 - 10**2, 3**2 + 2**2 + 3**2
    assert costs.forward_s[0] == pytest.approx(
        [2 * layer_forward(6, area_split), 2 * layer_forward(8, area_padded)]
    )
    for stage in range(2):
        assert costs.backward_s[stage] == pytest.approx(
            [2 * layer_backward(6, area_split), 2 * layer_backward(8, area_padded)]
        )


def test_the_halves_of_a_backward_share_its_work_and_its_collectives() -> None:
    costs = CostModel(toy_setup()).chunk_costs([SPLIT, PADDED])
    assert costs.input_s is not None and costs.weight_s is not None
    for chunk, tokens, area in ((0, 6, 16**2 - 10**2), (1, 8, 3**2 + 2**2 + 3**2)):
        # one gather of 10 s each; half the linear work, and half a forward's fixed cost on top
        inputs = max(1.0 * tokens + 0.08 * area + 5.0, 10.0) + 1.0 * tokens + 1.0
        weights = max(1.0 * tokens + 1.5, 10.0)
        for stage in range(2):
            assert costs.input_s[stage, chunk] == pytest.approx(2 * inputs)
            assert costs.weight_s[stage, chunk] == pytest.approx(2 * weights)


def test_to_split_a_backward_never_saves_work() -> None:
    cost = CostModel(toy_setup())
    tokens, areas = np.array([1.0, 6.0, 100.0]), np.array([1.0, 156.0, 90000.0])
    costs = cost.size_costs(tokens, areas)
    assert costs.input_s is not None and costs.weight_s is not None
    more = (costs.input_s + costs.weight_s - costs.backward_s)[0] / 2
    # gathers hide under the smallest chunk's fixed costs, under the longest one's work
    assert more == pytest.approx([0.0, 4.0, 1.5])
    assert cost.split_times(tokens, areas) == pytest.approx(more - 1.5)


def test_the_loss_runs_forward_and_backward_inside_the_last_forward() -> None:
    costs = CostModel(toy_setup()).chunk_costs([SPLIT])
    logits = 2 * 32 * 8 / (1000 * 0.64 * 2)
    assert costs.forward_s[1, 0] - costs.forward_s[0, 0] == pytest.approx(3 * logits * 6)
    assert costs.backward_s[1, 0] == costs.backward_s[0, 0]


def test_eq_11_recompute_is_one_layers_forward_with_its_all_to_alls_but_no_gather() -> None:
    costs = CostModel(toy_setup()).chunk_costs([SPLIT])
    assert costs.recompute_s[0] == pytest.approx((6 + 0.016 * 156 + 3) + (6 + 1))


def test_p2p_sends_the_hidden_states_of_all_tokens_through_the_nodes_link() -> None:
    costs = CostModel(toy_setup()).chunk_costs([SPLIT, PADDED])
    assert costs.p2p_s == pytest.approx([2 * 8 * 6 / 32 + 0.5, 2 * 8 * 8 / 32 + 0.5])


def test_a_stage_over_two_nodes_sends_through_both_links() -> None:
    wide = ModelSpec("wide", 4, 16, 16, 4, 4, 4, 32)
    setups = (setup_of(wide, Layout(1, sp, 1, (4,)), CLUSTER) for sp in (2, 4))
    one, two = (CostModel(setup).chunk_costs([PADDED]) for setup in setups)
    assert two.p2p_s[0] - 0.5 == pytest.approx((one.p2p_s[0] - 0.5) / 2)


@pytest.mark.parametrize(("overlap", "hidden"), [(1.0, 10.0), (0.5, 5.0), (0.0, 0.0)])
def test_a_gather_hides_under_compute_by_the_overlap(overlap: float, hidden: float) -> None:
    cost = CostModel(toy_setup(cluster=replace(CLUSTER, zero_overlap=overlap)))
    tokens, area = 1000, 0  # compute is far longer than the gathers of 10 s and 20 s
    plain = CostModel(toy_setup(zero_stage=0)).total_time(tokens, area)
    assert cost.total_time(tokens, area) - plain == pytest.approx(2 * 3 * (10.0 - hidden))


def test_without_zero_nothing_is_gathered() -> None:
    assert CostModel(toy_setup(zero_stage=0)).coefficients.gather_s == 0.0
    c = CostModel(toy_setup()).coefficients
    assert c.gather_s == pytest.approx(0.5 * 2 * 640 / 64)


def test_a_single_rank_neither_gathers_nor_exchanges() -> None:
    c = CostModel(toy_setup(layout=Layout(2, 1, 1, (2, 2)))).coefficients
    assert (c.gather_s, c.all2all_s, c.latency_s) == (0.0, 0.0, 0.0)


def test_padded_heads_are_computed_and_exchanged() -> None:
    model, cluster = BUILTIN_MODELS["llama-30b"], BUILTIN_CLUSTERS["a800-80g-4x8"]
    padded = CostModel(
        setup_of(model, make_layout(model, 4, 8), cluster)
    ).coefficients  # 52 -> 56 heads
    exact = CostModel(setup_of(model, make_layout(model, 4, 4), cluster)).coefficients
    assert padded.attention_forward_s * 8 == pytest.approx(exact.attention_forward_s * 4 * 56 / 52)
    exchanged = padded.all2all_s * 8 * 8 / 7, exact.all2all_s * 4 * 4 / 3
    assert exchanged[0] == pytest.approx(exchanged[1] * 56 / 52)


def test_replicated_kv_heads_are_exchanged() -> None:
    grouped = replace(MODEL, num_heads=4, head_dim=2, num_kv_heads=1)
    cluster = replace(CLUSTER, devices_per_node=4)
    c = CostModel(setup_of(grouped, Layout(1, 4, 1, (4,)), cluster, joins_qkv=False)).coefficients
    # one kv head of 2 on each of 4 ranks: 2 bytes * (2 * 8 + 2 * 8) / 4 * 3/4 at 16 bytes/s
    assert c.all2all_s == pytest.approx(2 * 32 / 4 * 0.75 / 16)


def test_slices_of_a_sequence_add_up_to_its_area() -> None:
    slices = [Slice(0, 0, 7, False), Slice(0, 7, 4, False), Slice(0, 11, 9, True)]
    assert sum(CAUSAL.of_chunk(Chunk((s,))) for s in slices) == 20**2


def test_merging_two_chunks_saves_one_fixed_cost() -> None:
    cost = CostModel(toy_setup(zero_stage=0))
    parts = cost.total_time(5, 25) + cost.total_time(7, 49)
    assert parts - cost.total_time(12, 74) == pytest.approx(2 * (3 + 5 + 1 + 1))


@pytest.mark.parametrize(
    ("name", "linear", "forward", "backward"),
    [
        ("llama-7b", 2.80e-7, 5.97e-12, 1.82e-11),
        ("llama-13b", 4.38e-7, 7.46e-12, 2.28e-11),
        ("llama-30b", 7.39e-7, 9.70e-12 * 56 / 52, 2.96e-11 * 56 / 52),
    ],
)
def test_eq_1_gives_the_documented_coefficients_of_llama_on_a800(
    name: str, linear: float, forward: float, backward: float
) -> None:
    model = BUILTIN_MODELS[name]
    c = CostModel(
        setup_of(model, make_layout(model, 4, 8), BUILTIN_CLUSTERS["a800-80g-4x8"])
    ).coefficients
    assert c.linear_s == pytest.approx(linear, rel=3e-3)
    assert c.attention_forward_s == pytest.approx(forward, rel=3e-3)
    assert c.attention_backward_s == pytest.approx(backward, rel=3e-3)


def test_eq_1_dimensions_twice_the_speed_halves_every_compute_coefficient() -> None:
    slow = CostModel(toy_setup()).coefficients
    fast = CostModel(toy_setup(cluster=replace(CLUSTER, peak_flops=2000.0))).coefficients
    for name in ("linear_s", "attention_forward_s", "attention_backward_s", "logits_s"):
        assert getattr(fast, name) == pytest.approx(getattr(slow, name) / 2)
    assert fast.all2all_s == slow.all2all_s


def test_many_times_at_once_equal_one_at_a_time() -> None:
    cost = CostModel(toy_setup())
    tokens, areas = np.array([1.0, 50.0, 3.0]), np.array([1.0, 2500.0, 700.0])
    singly = [cost.total_time(t, q) for t, q in zip(tokens, areas, strict=True)]
    assert cost.total_times(tokens, areas).tolist() == singly


@pytest.mark.parametrize("overlap", [0.0, 0.6, 1.0])
def test_parameters_kept_gathered_are_waited_for_once_a_step(overlap: float) -> None:
    cluster = replace(CLUSTER, zero_overlap=overlap)
    layout = make_layout(MODEL, 2, 2)
    often = CostModel(toy_setup(layout=layout, cluster=cluster))
    once = CostModel(toy_setup(layout=layout, cluster=cluster, keeps_gathered=True))
    chunks = [Chunk((Slice(i, 0, 2, True),)) for i in range(5)]
    gather_s, layers = often.coefficients.gather_s, layout.stage_layers[0]
    assert gather_s > 0.0
    dear, cheap = often.chunk_costs(chunks), once.chunk_costs(chunks)
    waits_s = (dear.forward_s - cheap.forward_s)[0]
    compute_s = float(often._forward_compute(*chunk_sizes(chunks))[0])
    wait_s = layers * (gather_s - overlap * min(compute_s, gather_s))
    assert waits_s == pytest.approx([wait_s * 4 / 5] * 5)
    assert (cheap.backward_s <= dear.backward_s).all()
    if overlap == 0.0:
        assert (dear.backward_s - cheap.backward_s)[0] == pytest.approx([layers * gather_s] * 5)
