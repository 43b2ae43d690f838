"""Slice mesh and Algorithm 1: hand-worked cases, a naive rewrite as oracle, and properties."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from hypothesis import example, given
from hypothesis import strategies as st
from planner_cases import setup_of

from ds_infinipipe.errors import ConfigError, DataError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS, ClusterSpec
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS, ModelSpec
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, ChunkKind
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.paper.chunking import chunk_sequences, slice_mesh, thresholds

GIB = 2**30
TOY = ModelSpec("toy", 4, 32, 48, 8, 8, 4, 64)
CPU = BUILTIN_CLUSTERS["cpu-local"]
# time is one unit a token: no fixed cost, no quadratic term worth naming, no communication
PROPORTIONAL = replace(
    CPU,
    attention_forward_efficiency=1e12,
    attention_backward_efficiency=1e12,
    layer_overhead_forward_s=0.0,
    layer_overhead_backward_s=0.0,
)
# attention is all there is: time is the area
QUADRATIC = replace(PROPORTIONAL, linear_efficiency=1e12)
QUADRATIC = replace(QUADRATIC, attention_forward_efficiency=1.0, attention_backward_efficiency=1.0)


def models(
    sp: int = 1, cluster: ClusterSpec = CPU, limit_bytes: int = 4 * GIB, alignment: int = 1
) -> tuple[CostModel, MemoryModel]:
    """Costs without any gather."""
    setup = setup_of(
        TOY, make_layout(TOY, 2, sp), cluster, limit_bytes=limit_bytes, alignment=alignment
    )
    return CostModel(setup.run_with(zero_stage=0)), MemoryModel(setup)


def llama(limit_gib: int = 72) -> tuple[CostModel, MemoryModel]:
    model, cluster = BUILTIN_MODELS["llama-13b"], BUILTIN_CLUSTERS["a800-80g-4x8"]
    setup = setup_of(model, make_layout(model, 4, 8), cluster, limit_bytes=limit_gib * GIB)
    return CostModel(setup.run_with(zero_stage=0)), MemoryModel(setup)


def chunked(
    lengths: list[int],
    k: int,
    sp: int = 1,
    alignment: int = 1,
    token_limit: int | None = None,
    cluster: ClusterSpec = CPU,
) -> tuple[Chunk, ...]:
    cost, memory = models(sp, cluster, alignment=alignment)
    return chunk_sequences(lengths, k, cost, memory, token_limit)


def contents(chunks: tuple[Chunk, ...]) -> list[list[int]]:
    return [[s.length for s in chunk.slices] for chunk in chunks]


def bisected_cut(cost: CostModel, longest: int, share: float) -> float:
    """Where the backward work of the first tokens is `share` of the whole, found by halving."""

    def work(tokens: float) -> float:
        return cost.backward_time(tokens, tokens * tokens) - cost.backward_time(0, 0)

    low, high = 0.0, float(longest)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if work(middle) < share * work(longest) else (low, middle)
    return low


@pytest.mark.parametrize("unit", [1, 8, 256])
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("longest", [65536, 65537, 9001])
def test_the_closed_form_mesh_equals_bisection_to_half_a_unit(
    longest: int, k: int, unit: int
) -> None:
    cost, _ = llama()
    ends = slice_mesh(longest, k, cost, unit)
    expected = [bisected_cut(cost, longest, i / k) for i in range(1, k)]
    assert len(ends) == k
    assert ends[-1] == longest
    for end, cut in zip(ends, expected, strict=False):
        assert end % unit == 0
        assert abs(end - cut) <= unit / 2 + 1e-3


def test_slices_get_shorter_as_their_context_grows() -> None:
    ends = slice_mesh(65536, 6, llama()[0])
    slices = np.diff((0, *ends))
    assert (np.diff(slices) < 0).all()


def test_where_time_is_proportional_slices_are_equal() -> None:
    assert slice_mesh(100, 4, models(cluster=PROPORTIONAL)[0]) == (25, 50, 75, 100)


def test_where_time_is_quadratic_cuts_follow_the_square_root() -> None:
    cost, _ = models(cluster=QUADRATIC)
    assert slice_mesh(1000, 4, cost) == (500, 707, 866, 1000)


def test_one_slice_is_the_whole_sequence() -> None:
    assert slice_mesh(13, 1, models()[0], 8) == (13,)


def test_more_slices_than_tokens_gives_slices_of_one_token() -> None:
    assert slice_mesh(3, 9, models()[0]) == (1, 2, 3)


def test_slices_that_vanish_by_alignment_are_left_out() -> None:
    cost, _ = models(cluster=PROPORTIONAL)
    assert slice_mesh(20, 5, cost, 8) == (8, 16, 20)
    assert slice_mesh(5, 4, cost, 8) == (5,)
    assert slice_mesh(1, 4, cost) == (1,)


def test_long_sequences_get_the_slices_of_the_mesh_and_a_remainder() -> None:
    """III-B: a mesh {8K, 4K, 2K} splits 12K and more into 8K, 4K and what is left."""
    cost, _ = models(cluster=PROPORTIONAL)
    assert slice_mesh(12, 3, cost) == (4, 8, 12)
    chunks = chunked([12, 9, 5], 3, cluster=PROPORTIONAL)
    assert contents(chunks) == [[4], [4], [4], [4], [4], [1], [4], [1]]
    assert [c.context_len for c in chunks] == [0, 4, 8, 0, 4, 8, 0, 4]


def test_a_sequence_as_long_as_the_first_slice_is_not_cut() -> None:
    chunks = chunked([8, 4, 5], 2, token_limit=4, cluster=PROPORTIONAL)
    assert contents(chunks) == [[4], [4], [4], [1], [4]]
    assert chunks[-1].slices[0].is_whole


def test_the_emptiest_time_per_token_takes_the_next_sequence() -> None:
    """Both tails are 3 tokens; the one with less context is lighter and gets the short one."""
    chunks = chunked([1000, 503, 710, 3], 4, cluster=QUADRATIC)
    hosts = [c for c in chunks if any(s.sequence == 3 for s in c.slices)]
    assert [(c.slices[0].sequence, c.context_len) for c in hosts] == [(1, 500)]


def test_a_new_bucket_is_opened_only_without_room_for_tokens() -> None:
    # T_m = T_t = 10 tokens: 6 and 5 open buckets, 4 joins 5 (shorter, so less time a token)
    chunks = chunked([10, 6, 5, 4, 3], 1, cluster=PROPORTIONAL)
    assert contents(chunks) == [[10], [6, 3], [5, 4]]


def test_the_time_threshold_is_loosened_where_tokens_still_fit() -> None:
    # T_m = 20 tokens, T_t = 10: 6 beside 10 breaks T_t, which becomes 16; then 5 has no room
    chunks = chunked([10, 6, 5, 4, 3], 1, token_limit=20, cluster=PROPORTIONAL)
    assert contents(chunks) == [[10, 6], [5, 4, 3]]


def test_loosening_looks_only_at_buckets_with_room_for_the_tokens() -> None:
    """As printed, line 14 would take the bucket without room for ever (T_t never changes)."""
    # 10 + 6 leaves no room for 5, so T_t = 16 must be raised by the bucket that has room
    chunks = chunked([10, 6, 9, 9], 1, token_limit=18, cluster=PROPORTIONAL)
    assert sorted(map(sum, contents(chunks))) == [16, 18]


def test_a_full_tail_takes_no_shorts() -> None:
    chunks = chunked([24, 7, 1, 1], 3, cluster=PROPORTIONAL)  # slices of 8, T_m = 8
    assert contents(chunks) == [[8], [8], [8], [7, 1], [1]]
    assert [c.kind.value for c in chunks] == ["split"] * 3 + ["batched"] * 2


def test_shorts_join_tails_and_no_other_slice() -> None:
    chunks = chunked([24, 17, 1, 1], 3, cluster=PROPORTIONAL)
    assert contents(chunks) == [[8], [8], [8], [8], [8], [1, 1, 1]]
    assert [c.kind.value for c in chunks] == ["split"] * 5 + ["hybrid"]


def test_typical_tokens_fill_the_time_threshold() -> None:
    cost, memory = llama(10**6)
    short = [1000] * 50
    bounds = thresholds(short, (65536,), cost, memory)
    assert cost.total_time(bounds.tokens, bounds.tokens * 1000) <= bounds.time_s
    assert cost.total_time(bounds.tokens + 8, (bounds.tokens + 8) * 1000) > bounds.time_s
    assert bounds.time_s == cost.total_time(65536, 65536**2)


def test_memory_caps_the_token_threshold() -> None:
    cost, memory = llama(20)
    capacity = memory.token_capacity(1, 20 * GIB)
    roomy = thresholds([1000] * 9, (65536,), *llama(10**6))
    tight = thresholds([1000] * 9, (65536,), cost, memory)
    assert 65536 < capacity < roomy.tokens
    assert tight.tokens == capacity // 8 * 8


def test_the_token_threshold_never_drops_below_the_largest_slice() -> None:
    assert thresholds([3], (10, 13), *models(sp=4, limit_bytes=1)).tokens == 12
    assert thresholds([3], (10, 13), *models(sp=4), token_limit=1).tokens == 12


@pytest.mark.parametrize("k", range(1, 7))
def test_one_sequence_of_one_token_is_one_padded_chunk(k: int) -> None:
    (chunk,) = chunked([1], k, sp=4, alignment=3)
    assert (chunk.tokens, chunk.padding, chunk.kind) == (1, 3, ChunkKind.BATCHED)


def test_cut_sequences_come_first_longest_first() -> None:
    chunks = chunked([3, 40, 9, 64, 2, 10], 4, token_limit=1)
    cut = [c.slices[0].sequence for c in chunks if c.keeps_kv]
    assert cut == sorted(cut, key=lambda s: -[3, 40, 9, 64, 2, 10][s])
    assert [c.keeps_kv for c in chunks] == sorted((c.keeps_kv for c in chunks), reverse=True)


def test_batched_chunks_are_sorted_by_tokens_not_by_opening() -> None:
    chunks = chunked([10, 6, 5, 4, 1], 1, cluster=PROPORTIONAL)
    assert contents(chunks) == [[10], [5, 4, 1], [6]]


def test_numpy_lengths_give_plain_integers() -> None:
    cost, memory = models()
    lengths = [30, 7, 3]
    chunks = chunk_sequences(np.array(lengths), 3, cost, memory)  # type: ignore[arg-type]
    assert chunks == chunk_sequences(lengths, 3, cost, memory)
    assert all(type(s.length) is int and type(s.start) is int for c in chunks for s in c.slices)


def naive_algorithm_1(
    lengths: list[int], k: int, cost: CostModel, memory: MemoryModel, sp: int, unit: int
) -> list[list[tuple[int, int]]]:
    """Line by line with lists, times from scratch: (sequence, start) of each chunk's slices."""
    ends = slice_mesh(max(lengths), k, cost, unit)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    short = [i for i in order if lengths[i] <= ends[0]]
    bounds = thresholds([lengths[i] for i in short], ends, cost, memory)
    time_s, done, buckets = bounds.time_s, [], []
    for i in (i for i in order if lengths[i] > ends[0]):
        starts = [0, *(e for e in ends if e < lengths[i])]
        done += [[(i, start)] for start in starts[:-1]]
        buckets.append([(i, starts[-1])])

    def total(bucket: list[tuple[int, int]]) -> tuple[int, float]:
        tokens = sum(lengths[i] - start for i, start in bucket)
        return tokens, cost.total_time(tokens, sum(lengths[i] ** 2 - s**2 for i, s in bucket))

    for i in short:
        while True:
            room = [b for b in buckets if total(b)[0] + lengths[i] <= bounds.tokens]
            if not room:
                buckets.append([(i, 0)])
                break
            fits = [b for b in room if total([*b, (i, 0)])[1] <= time_s * (1 + 1e-9)]
            if fits:
                min(fits, key=lambda b: total(b)[1] / total(b)[0]).append((i, 0))
                break
            time_s = min(total([*b, (i, 0)])[1] for b in room)
    return done + buckets


LENGTHS = st.one_of(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.lists(st.sampled_from([1, 2, 3, 7, 64, 65, 1000]), min_size=1, max_size=60),
    st.lists(st.integers(1, 70000), min_size=1, max_size=12),
)
CLUSTERS = st.sampled_from([CPU, PROPORTIONAL, QUADRATIC, BUILTIN_CLUSTERS["a800-80g-4x8"]])


@given(lengths=LENGTHS, k=st.integers(1, 8), sp=st.sampled_from([1, 2, 8]), cluster=CLUSTERS)
@examples(100)
def test_packing_equals_the_naive_algorithm(
    lengths: list[int], k: int, sp: int, cluster: ClusterSpec
) -> None:
    cost, memory = models(sp, cluster)
    chunks = chunk_sequences(lengths, k, cost, memory)
    expected = naive_algorithm_1(lengths, k, cost, memory, sp, sp)
    assert sorted([(s.sequence, s.start) for s in c.slices] for c in chunks) == sorted(expected)


@given(
    lengths=LENGTHS,
    k=st.integers(1, 8),
    sp=st.sampled_from([1, 2, 3, 4, 8]),
    alignment=st.sampled_from([1, 2, 3, 8, 100]),
    token_limit=st.none() | st.integers(1, 5000),
    cluster=CLUSTERS,
)
@example(lengths=[1], k=8, sp=8, alignment=100, token_limit=None, cluster=CPU)
@example(lengths=[65536] * 12, k=8, sp=1, alignment=1, token_limit=1, cluster=QUADRATIC)
@example(lengths=[2**i for i in range(17)], k=5, sp=2, alignment=3, token_limit=None, cluster=CPU)
@examples(100)
def test_every_chunking_keeps_the_rules(
    lengths: list[int],
    k: int,
    sp: int,
    alignment: int,
    token_limit: int | None,
    cluster: ClusterSpec,
) -> None:
    chunks = chunked(lengths, k, sp, alignment, token_limit, cluster)
    unit = math.lcm(sp, alignment)
    positions = [0] * len(lengths)
    num_slices = [0] * len(lengths)
    for chunk in chunks:
        assert chunk.padding == -chunk.tokens % sp  # only as needed, always less than sp
        for number, piece in enumerate(chunk.slices):
            assert piece.start == positions[piece.sequence]  # in order, without a gap
            assert piece.length >= 1
            positions[piece.sequence] = piece.end
            num_slices[piece.sequence] += 1
            assert piece.is_tail == (piece.end == lengths[piece.sequence])
            assert piece.is_tail or piece.end % unit == 0  # aligned, so no padding inside
            assert number == 0 or piece.is_whole  # a cut sequence's slice stands first
        if not chunk.slices[0].is_tail:
            assert len(chunk.slices) == 1
    assert positions == lengths  # each token exactly once
    assert max(num_slices) == num_slices[lengths.index(max(lengths))] <= k


@given(lengths=LENGTHS, k=st.integers(1, 8), sp=st.sampled_from([1, 2, 3, 8]), cluster=CLUSTERS)
@examples(100)
def test_chunks_never_exceed_the_token_threshold_even_padded(
    lengths: list[int], k: int, sp: int, cluster: ClusterSpec
) -> None:
    cost, memory = models(sp, cluster=cluster)
    for token_limit in (None, 7, 100):
        chunks = chunk_sequences(lengths, k, cost, memory, token_limit)
        ends = slice_mesh(max(lengths), k, cost, sp)
        short = [x for x in lengths if x <= ends[0]]
        bounds = thresholds(short, ends, cost, memory, token_limit)
        assert max(c.padded_tokens for c in chunks) <= bounds.tokens


@given(lengths=LENGTHS, k=st.integers(1, 8))
@examples(100)
def test_chunking_is_deterministic(lengths: list[int], k: int) -> None:
    assert chunked(lengths, k, sp=2) == chunked(list(lengths), k, sp=2)


@given(lengths=LENGTHS, k=st.integers(1, 8), data=st.data())
@examples(100)
def test_the_order_of_the_batch_does_not_change_what_is_packed(
    lengths: list[int], k: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(lengths))
    assert contents(chunked(lengths, k)) == contents(chunked(shuffled, k))


def test_eight_times_the_batch_takes_less_than_the_square_of_the_time() -> None:
    """About 0.01 s of CPU for 512 sequences and 0.1 s for 4096: a tenfold."""
    rng = np.random.default_rng(0)
    cost, memory = llama()

    def seconds(batch: int) -> float:
        drawn = np.exp(rng.normal(math.log(1800), 1.2, batch)).astype(int) + 16
        lengths = [65536, *np.minimum(drawn, 65536).tolist()]
        times = []
        for _ in range(5):
            start = time.process_time()
            chunk_sequences(lengths, 4, cost, memory)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(4096) < 32 * seconds(512)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DataError, match="no sequences"):
        chunked([], 1)


@pytest.mark.parametrize("length", [0, -3])
def test_an_empty_sequence_is_refused_by_number(length: int) -> None:
    with pytest.raises(DataError, match=f"sequence 1 has length {length}"):
        chunked([5, length], 1)


def test_less_than_one_slice_is_refused() -> None:
    with pytest.raises(ConfigError, match="the number of slices is 0"):
        chunked([5], 0)
