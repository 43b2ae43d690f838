"""Lean mode on one stage, and how replicas share a batch."""

from __future__ import annotations

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import plan_with, setup_of

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import InfeasiblePlanError
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.lean.one_stage import WholeChunks
from ds_infinipipe.planner.search.replicas import split_batch

CLUSTER = load_cluster("a800-80g-4x8")
GIB = 2**30


def plan(lengths: list[int], model: str = "llama-7b", gib: float = 60.0, **changes: object) -> Plan:
    spec = BUILTIN_MODELS[model]
    layout = make_layout(spec, 1, 8)
    return plan_with(lengths, spec, layout, CLUSTER, memory_limit_gib=gib, **changes)


def whole_chunks(model: str, most_tokens: int) -> WholeChunks:
    """Within 60 GiB."""
    spec = BUILTIN_MODELS[model]
    setup = setup_of(spec, make_layout(spec, 1, 8), CLUSTER, limit_bytes=60 * GIB)
    return WholeChunks(MemoryModel(setup), most_tokens)


def recomputed(plan: Plan) -> int:
    return int(np.sum(plan.pipelines[0].recompute))


@pytest.mark.parametrize("law", ["github-a", "github-b", "commoncrawl"])
@pytest.mark.parametrize(
    ("model", "gib"), [("llama-7b", 26.0), ("llama-7b", 60.0), ("llama-13b", 72.0)]
)
def test_lean_is_never_slower_than_paper_mode(law: str, model: str, gib: float) -> None:
    rng = np.random.default_rng(3)
    lengths = [int(n) for n in sample_lengths(law, 60, 65536, rng)]
    lean, paper = (plan(lengths, model, gib, mode=mode) for mode in ("lean", "paper"))
    assert lean.predicted.step_time_s <= paper.predicted.step_time_s


def test_a_long_sequence_beside_many_short_ones_is_not_slower_than_in_paper_mode() -> None:
    lengths = [65536] + [3000] * 60
    lean, paper = (plan(lengths, "llama-13b", 72.0, mode=mode) for mode in ("lean", "paper"))
    assert lean.predicted.step_time_s < paper.predicted.step_time_s


def test_what_fits_as_it_is_fills_the_fewest_chunks_and_recomputes_nothing() -> None:
    found = plan([8192] * 24)
    capacity = whole_chunks("llama-7b", 24 * 8192).capacity(0)
    assert recomputed(found) == 0
    assert len(found.chunks) == -(-24 // (capacity // 8192))


def test_chunks_but_one_need_no_padding_where_sequences_can_be_swapped() -> None:
    rng = np.random.default_rng(4)
    lengths = [int(n) for n in sample_lengths("commoncrawl", 200, 16384, rng)]
    found = plan(lengths)
    assert len(found.chunks) > 2
    assert sum(chunk.padding for chunk in found.chunks) == -sum(lengths) % 8


def test_the_capacity_fits_and_eight_more_tokens_do_not() -> None:
    whole = whole_chunks("llama-13b", 2**24)
    for layers in (0, 7, 40):
        capacity = whole.capacity(layers)
        assert whole.fits(capacity, layers)
        assert not whole.fits(capacity + 8, layers)


def test_a_sequence_that_needs_recomputation_alone_does_not_make_the_others_recompute() -> None:
    capacity = whole_chunks("llama-7b", 2**24).capacity(0)
    found = plan([capacity + 4096] + [4096] * 40)
    counts = found.pipelines[0].recompute[0]
    assert sum(c > 0 for c in counts) == 1


def test_greedy_recomputes_the_same_everywhere() -> None:
    found = plan([65536] + [4096] * 40, "llama-13b", 70.0, solver="greedy")
    assert len(set(found.pipelines[0].recompute[0])) == 1


def test_full_and_no_recomputation_are_kept_to() -> None:
    lengths = [8192] * 6
    assert recomputed(plan(lengths, recompute="none")) == 0
    full = plan(lengths, recompute="full")
    assert recomputed(full) == 32 * len(full.chunks)
    with pytest.raises(InfeasiblePlanError):
        plan([200_000], recompute="none", gib=40.0)


def test_a_token_limit_below_the_longest_sequence_still_cuts_it() -> None:
    found = plan([16384, 2048], token_limit=4096)
    assert max(chunk.tokens for chunk in found.chunks) <= 4096


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 60_000), max_size=60),
    num_replicas=st.integers(1, 6),
    pp=st.sampled_from([1, 2, 4]),
)
def test_every_sequence_goes_to_one_replica_and_none_could_be_moved_for_the_better(
    lengths: list[int], num_replicas: int, pp: int
) -> None:
    spec = BUILTIN_MODELS["llama-13b"]
    cost = CostModel(setup_of(spec, make_layout(spec, pp, 4), CLUSTER))
    shares = split_batch(lengths, num_replicas, cost)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert len(shares) == num_replicas
    c = cost.coefficients
    layer_s = [
        (3 * c.linear_s + 2 * c.all2all_s) * n
        + (c.attention_forward_s + c.attention_backward_s) * n**2
        for n in lengths
    ]
    work_s = [
        cost.layout.stage_layers[-1] * s + 3 * c.logits_s * n
        for s, n in zip(layer_s, lengths, strict=True)
    ]
    loads = [sum(work_s[i] for i in share) for share in shares]
    if lengths:
        assert max(loads) <= sum(work_s) / num_replicas + max(work_s) * (1 + 1e-9)
        busiest = loads.index(max(loads))
        for i in shares[busiest]:
            assert min(loads) + work_s[i] >= max(loads) * (1 - 2e-3)
