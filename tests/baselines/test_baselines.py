"""Baselines on cases that can be checked by hand, and what must hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import setup_of

from ds_infinipipe.baselines.dapple import dapple
from ds_infinipipe.baselines.deepspeed import deepspeed
from ds_infinipipe.baselines.flexsp import flexsp, partitions
from ds_infinipipe.baselines.gpipe import gpipe
from ds_infinipipe.baselines.groups import group_model
from ds_infinipipe.baselines.megatron import megatron
from ds_infinipipe.baselines.packing import best_fit, fixed_chunks, lightest_bin_first
from ds_infinipipe.baselines.pipeline import run_pipeline
from ds_infinipipe.baselines.registry import BASELINES, Workload, compare
from ds_infinipipe.baselines.result import PAPER, TUNED, BaselineResult, fastest, infeasible
from ds_infinipipe.baselines.seq1f1b import fixed_size_chunker, seq1f1b
from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import DataError
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout, make_setup
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.time import CostModel

CLUSTER = load_cluster("a800-80g-4x8")
SMALL_HEAD = replace(BUILTIN_MODELS["llama-7b"], vocab_size=1)
INSTANT = replace(CLUSTER, node_p2p_bandwidth=1e30, p2p_latency_s=0.0)


def workload(
    lengths: list[int], *, memory_gib: float = 72.0, model: str = "llama-7b", pp: int = 4
) -> Workload:
    spec = BUILTIN_MODELS[model]
    settings = PlannerSettings(solver="greedy")
    setup = make_setup(spec, CLUSTER, make_layout(spec, pp, 8), memory_limit_gib=memory_gib)
    return Workload(tuple(lengths), setup, settings)


def drawn(num_sequences: int = 96, context: int = 32768, name: str = "github-b") -> list[int]:
    rng = np.random.default_rng(3)
    return [int(n) for n in sample_lengths(name, num_sequences, context, rng)]


def balanced(lengths: list[int], pp: int = 4) -> Workload:
    """Stages alike (hardly a head) and transfers free, so that closed forms hold."""
    return Workload(tuple(lengths), setup_of(SMALL_HEAD, make_layout(SMALL_HEAD, pp, 8), INSTANT))


def chunk_time_s(work: Workload, length: int) -> float:
    cost = CostModel(work.setup)
    costs = cost.chunk_costs([Chunk((Slice(0, 0, length, True),))])
    return float(costs.forward_s[0, 0] + costs.backward_s[0, 0])


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_equal_sequences_take_chunks_plus_stages_minus_one(pp: int) -> None:
    work = balanced([8192] * 6, pp)
    expected_s = (6 + pp - 1) * chunk_time_s(work, 8192)
    one_each = run_pipeline("x", TUNED, work, fixed_size_chunker(work, 8192), "")
    assert one_each.step_time_s == pytest.approx(expected_s, rel=1e-3)
    assert one_each.bubble_ratio == pytest.approx((pp - 1) / (6 + pp - 1), abs=1e-3)
    assert one_each.recompute_s == 0.0


def test_dapple_is_seq1f1b_with_chunks_of_whole_sequences() -> None:
    work = balanced([8192] * 6)
    whole = run_pipeline("x", PAPER, work, fixed_size_chunker(work, 8192), "")
    dapple_paper = dapple(work)[0]
    assert dapple_paper.step_time_s == whole.step_time_s
    assert dapple_paper.peak_bytes == whole.peak_bytes


def test_gpipe_recomputes_everything_and_holds_the_whole_batch() -> None:
    work = balanced([8192] * 6)
    paper = gpipe(work)[0]
    cost = CostModel(work.setup)
    layer_s = cost.chunk_costs([Chunk((Slice(0, 0, 8192, True),))]).recompute_s[0]
    assert paper.recompute_s == pytest.approx(8 * 6 * layer_s)
    expected_s = (6 + 3) * (chunk_time_s(work, 8192) + 8 * layer_s)
    assert paper.step_time_s == pytest.approx(expected_s, rel=1e-3)
    plain = run_pipeline(
        "x", TUNED, work, fixed_size_chunker(work, 8192), "", keeps_all_in_flight=True
    )
    window = run_pipeline("x", TUNED, work, fixed_size_chunker(work, 8192), "")
    assert plain.peak_bytes > window.peak_bytes
    assert plain.step_time_s == pytest.approx(window.step_time_s, rel=1e-3)


def test_deepspeed_gives_every_group_the_same_number_of_equal_sequences() -> None:
    work = workload([16384] * 16)
    paper, tuned = deepspeed(work)
    group = group_model(work, 16, 0)
    assert group is not None
    tokens, areas = np.array([8 * 16384.0]), np.array([8 * 16384.0**2])
    # two groups of 16 ranks, eight sequences each in one micro-batch
    assert paper.step_time_s == pytest.approx(group.times(tokens, areas)[0])
    assert paper.bubble_ratio == pytest.approx(0.0, abs=1e-9)
    assert paper.peak_bytes == group.peak_bytes(8 * 16384)
    assert tuned.step_time_s < paper.step_time_s


def test_groups_gather_from_all_nodes_whatever_their_degree() -> None:
    work = workload([1024])
    group = group_model(work, 8, 0)
    assert group is not None
    layer_bytes = 2 * work.setup.model.layer_params
    # three of four nodes' shards through the adapter, slower than the links
    assert group.cost.coefficients.gather_s == pytest.approx(3 / 4 * layer_bytes / 42.5e9)


def test_flexsp_of_one_sequence_is_the_best_single_group() -> None:
    work = workload([65536])
    times = []
    for degree in (1, 2, 4, 8, 16, 32):
        group = group_model(work, degree, 0)
        if group is not None and group.token_capacity(work.setup.limit_bytes) >= 65536:
            times.append(float(group.times(np.array([65536.0]), np.array([65536.0**2]))[0]))
    assert flexsp(work)[0].step_time_s == pytest.approx(min(times))


def test_megatron_of_equal_sequences_by_hand() -> None:
    length, layers = 16384, 32
    work = workload([length] * 8)
    model = work.setup.model
    paper = megatron(work)[0]  # TP 8, CP 2, DP 2: four micro-batches a replica, 10 layers twice
    rate, ranks = 312e12, 16
    linear_s = 2 * model.layer_params * length / (rate * 0.58 * ranks)
    attention_s = 2 * 4096 * length**2 / (rate * 0.55 * ranks)
    attention_back_s = 2.5 * 2 * 4096 * length**2 / (rate * 0.45 * ranks)
    collectives_s = 4 * (7 / 8 * 2 * 4096 * length / 2 / 165e9 + 15e-6)
    ring_s = 2 * 2 * 4096 * length / 2 / 42.5e9
    forward_s = linear_s + max(attention_s, ring_s) + collectives_s + 0.25e-3
    backward_s = 2 * linear_s + max(attention_back_s, 2 * ring_s) + collectives_s + 0.45e-3
    loss_s = 3 * 2 * model.embedding_params * length / (rate * 0.58 * ranks)
    micro_batch_s = layers * (forward_s + backward_s) + 10 * forward_s + loss_s
    params = layers * model.layer_params + 2 * model.embedding_params
    reduction_s = 3 / 4 * 6 * params / 8 / (42.5e9 / 8) + 2 * 15e-6
    assert paper.step_time_s == pytest.approx(4 * micro_batch_s + reduction_s)


def test_deepspeed_waits_for_its_slowest_group() -> None:
    work = workload([32768, 1024, 1024, 1024])
    result = deepspeed(work)[1]
    alone = min(
        float(group.times(np.array([32768.0]), np.array([32768.0**2]))[0])
        for degree in (1, 2, 4, 8, 16, 32)
        for group in [group_model(work, degree, 0)]
        if group is not None and group.token_capacity(work.setup.limit_bytes) >= 32768
    )
    assert result.step_time_s >= alone * (1 - 1e-9)


def test_the_papers_degrees_and_checkpointing_are_taken() -> None:
    seven, thirty = workload([4096] * 8), workload([4096] * 8, model="llama-30b")
    assert deepspeed(seven)[0].note.startswith("SP 16, 0 layers")
    assert deepspeed(thirty)[0].note.startswith("SP 32, 36 layers")
    assert flexsp(thirty)[0].note.startswith("36 layers")
    assert megatron(seven)[0].note.startswith("TP 8, CP 2, PP 1, DP 2")
    assert "10 layers" in megatron(seven)[0].note
    assert megatron(thirty)[0].note.startswith("TP 8, CP 4, PP 1, DP 1")


def test_a_group_holds_exactly_its_token_capacity() -> None:
    group = group_model(workload([1]), 8, 0)
    assert group is not None
    limit_bytes = 72 * 2**30
    capacity = group.token_capacity(limit_bytes)
    assert group.peak_bytes(capacity) <= limit_bytes < group.peak_bytes(capacity + 1)
    recomputing = group_model(workload([1]), 8, 32)
    assert recomputing is not None
    assert recomputing.token_capacity(limit_bytes) > 3 * capacity


def test_partitions_add_up_and_keep_both_limits() -> None:
    found = list(partitions(8, (1, 2, 4, 8)))
    assert (8,) in found and (4, 2, 2) in found and (1,) * 8 in found
    assert (4, 2, 1, 1) in found
    assert all(sum(part) == 8 for part in found)
    assert len(set(found)) == len(found) == 10  # binary partitions of 8
    many = list(partitions(32, (1, 2, 4, 8, 16, 32)))
    assert all(len(part) <= 16 and len(set(part)) <= 3 for part in many)


def test_flexsp_gives_a_long_sequence_a_wide_group_and_short_ones_narrow_ones() -> None:
    result = flexsp(workload([131072] + [2048] * 64))[1]
    degrees = [int(d) for d in result.note.split("SP ")[1].split(", ")]
    assert max(degrees) > min(degrees)


def test_megatron_hides_its_ring_under_long_attention_only() -> None:
    slow = replace(CLUSTER, node_p2p_bandwidth=CLUSTER.node_p2p_bandwidth / 8)
    shares = []
    for length in (4096, 262144):
        fast = workload([length] * 2, memory_gib=1000)
        work = replace(fast, setup=replace(fast.setup, cluster=slow))
        result = megatron(work)[0]
        shares.append(result.communication_s / result.step_time_s)
    assert shares[0] > shares[1]


@pytest.mark.parametrize("name", list(BASELINES))
def test_every_system_answers_with_sane_figures(name: str) -> None:
    work = workload(drawn())
    for result in BASELINES[name](work):
        assert result.feasible, result.note
        assert result.tokens_per_s == pytest.approx(work.num_tokens / result.step_time_s)
        assert 0.0 <= result.bubble_ratio < 1.0
        assert 0 < result.peak_bytes <= work.setup.limit_bytes
        spent_s = result.bubble_ratio * result.step_time_s
        spent_s += result.communication_s + result.recompute_s
        assert 0.0 <= spent_s < result.step_time_s


@pytest.mark.parametrize("system", [seq1f1b, dapple, gpipe, deepspeed, megatron])
def test_more_memory_is_never_slower_when_tuned(system: object) -> None:
    assert callable(system)
    times = []
    for memory_gib in (16.0, 24.0, 40.0, 72.0):
        tuned: BaselineResult = system(workload(drawn(48), memory_gib=memory_gib))[-1]
        times.append(tuned.step_time_s if tuned.feasible else float("inf"))
    assert times == sorted(times, reverse=True)
    assert times[-1] < float("inf")


@pytest.mark.parametrize("name", ["seq1f1b", "dapple", "gpipe", "deepspeed", "flexsp", "megatron"])
def test_tuned_is_never_slower_than_the_papers_configuration(name: str) -> None:
    paper, tuned = BASELINES[name](workload(drawn(), memory_gib=40.0))
    assert (paper.configuration, tuned.configuration) == (PAPER, TUNED)
    assert not paper.feasible or tuned.step_time_s <= paper.step_time_s


@pytest.mark.parametrize("name", list(BASELINES))
def test_memory_below_the_model_states_is_infeasible_with_a_reason(name: str) -> None:
    for result in BASELINES[name](workload(drawn(8), memory_gib=0.5)):
        assert not result.feasible
        assert result.note
        assert result.step_time_s == result.peak_bytes == 0


def test_more_layouts_never_slow_the_tuned_ones() -> None:
    work = workload(drawn(48))
    others = (make_layout(work.setup.model, 2, 8, 2), make_layout(work.setup.model, 1, 8, 4))
    wide = replace(work, other_layouts=others)
    for system in (seq1f1b, dapple):
        assert system(wide)[1].step_time_s <= system(work)[1].step_time_s


def test_replicas_wait_for_each_other_and_reduce_gradients() -> None:
    work = workload([8192] * 8)
    double = make_layout(work.setup.model, 2, 8, 2)
    two = replace(work, setup=replace(work.setup, layout=double))
    result = run_pipeline("x", TUNED, two, fixed_size_chunker(two, 8192), "")
    single = replace(work.setup, layout=replace(double, dp=1))
    half = replace(work, lengths=(8192,) * 4, setup=single)
    alone = run_pipeline("x", TUNED, half, fixed_size_chunker(half, 8192), "")
    assert result.step_time_s > alone.step_time_s
    extra_s = result.step_time_s - alone.step_time_s
    assert result.communication_s == pytest.approx(alone.communication_s + extra_s)


def test_full_checkpointing_is_slower_and_smaller_than_none() -> None:
    work = workload(drawn())
    none = BASELINES["without-checkpointing"](work)[0]
    full = BASELINES["full-checkpointing"](work)[0]
    assert full.step_time_s > none.step_time_s
    assert full.recompute_s > 0.0 == none.recompute_s


def test_a_comparison_keeps_the_order_of_the_table() -> None:
    results = compare(workload(drawn(16)), ("dapple", "ours"))
    assert [result.name for result in results][:1] == [results[0].name]
    assert results[0].name.startswith("ours")
    assert results[-1].name.startswith("DAPPLE")
    with pytest.raises(DataError, match="the batch is empty"):
        compare(replace(workload([1]), lengths=()))


def test_the_fastest_is_the_earlier_of_equals_and_feasible() -> None:
    slow = BaselineResult("x", TUNED, 2.0, 1.0, 0.0, 0.0, 0.0, 1, True, "slow")
    fast, same = replace(slow, step_time_s=1.0, note="a"), replace(slow, step_time_s=1.0, note="b")
    nothing = infeasible("x", TUNED, "no")
    assert fastest([nothing, slow, fast, same]).note == "a"
    assert fastest([nothing, nothing]).note == "no"


def test_fixed_chunks_cut_long_sequences_and_fill_their_tails() -> None:
    chunks = fixed_chunks([70, 10, 20, 30], 32, 2, 2)
    sizes = [[(s.sequence, s.start, s.length) for s in chunk.slices] for chunk in chunks]
    assert sizes == [
        [(0, 0, 32)],
        [(0, 32, 32)],
        [(0, 64, 6), (2, 0, 20)],
        [(3, 0, 30)],
        [(1, 0, 10)],
    ]


def test_even_pieces_differ_by_less_than_a_unit() -> None:
    chunks = fixed_chunks([100], 40, 4, 4, is_even=True)
    assert [chunk.tokens for chunk in chunks] == [36, 36, 28]


def test_packing_loses_no_sequence_and_keeps_the_capacity() -> None:
    lengths = drawn(64, 4096)
    bins = best_fit(lengths, 5000)
    assert sorted(i for members in bins for i in members) == list(range(64))
    assert all(sum(lengths[i] for i in members) <= 5000 for members in bins)
    even = lightest_bin_first(lengths, [float(n) for n in lengths], len(bins) + 2, 6000)
    assert even is not None
    assert sorted(i for members in even for i in members) == list(range(64))
    assert all(sum(lengths[i] for i in members) <= 6000 for members in even)
    assert lightest_bin_first(lengths, [1.0] * 64, 2, 6000) is None
