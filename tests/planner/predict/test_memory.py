"""Each equation of the memory model by hand, and the peak scan on orders worked on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.peak_bytes import peak_bytes
from planner_cases import setup_of

from ds_infinipipe.planner.facts.models import BUILTIN_MODELS, ModelSpec
from ds_infinipipe.planner.facts.setup import Layout, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.planner.predict.layer_bytes import (
    SavedTensor,
    fp8_product_bytes,
    logits_bytes,
    saved_tensors,
    stashed_token_bytes,
)
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.state_bytes import reduce_bucket_elements, state_bytes

# D 8, F 16, two heads of 4, two bytes an element; on two ranks each token costs
#   A  2 * (4 D + 3 D + 3 F) = 208 bytes over both ranks, without K and V
#   K, V rows: 2 tensors * 1 local head * 4 * 2 bytes = 16 bytes on each rank
MODEL = ModelSpec("toy", 4, 8, 16, 2, 2, 4, 32)
LAYOUT = Layout(2, 2, 1, (3, 1))
F, B = Op.FORWARD, Op.BACKWARD


def memory_of(
    model: ModelSpec = MODEL, layout: Layout = LAYOUT, block: int = 1024, **changes: Any
) -> MemoryModel:
    return MemoryModel(setup_of(model, layout, loss_block_tokens=block, **changes))


def saved(model: ModelSpec, sp: int, **changes: Any) -> tuple[SavedTensor, ...]:
    return saved_tensors(setup_of(model, Layout(1, sp, 1, (model.num_layers,)), **changes))


def whole(sequence: int, length: int, padding: int = 0) -> Chunk:
    return Chunk((Slice(sequence, 0, length, True),), padding)


def activations_peak(
    memory: MemoryModel,
    stage: int,
    order: Sequence[tuple[Op, int]],
    chunks: Sequence[Chunk],
    recompute: Sequence[int],
) -> int:
    return peak_bytes(memory, stage, order, chunks, recompute) - memory.static_bytes[stage]


@pytest.mark.parametrize(
    ("name", "token_bytes"), [("llama-7b", 139776), ("llama-13b", 175104), ("llama-30b", 227328)]
)
def test_eq_5_fused_layers_keep_7d_2dkv_3f_elements_per_token(name: str, token_bytes: int) -> None:
    model = BUILTIN_MODELS[name]
    elements = 7 * model.hidden_size + 2 * model.kv_size + 3 * model.ffn_size
    assert sum(t.token_bytes for t in saved(model, 1)) == 2 * elements == token_bytes


@pytest.mark.parametrize("size", [4, 8])
def test_eq_5_plain_layers_keep_9d_2dkv_4f_elements_and_statistics(size: int) -> None:
    statistics = 4 * (2 + 2)  # of two norms, and the log-sum-exp of two heads
    expected = size * (9 * 8 + 2 * 8 + 4 * 16) + statistics
    tensors = saved(MODEL, 2, fused_kernels=False, dtype_bytes=size)
    assert sum(t.token_bytes for t in tensors) == expected


def test_eq_5_plain_half_precision_layers_keep_float32_norm_inputs() -> None:
    expected = 2 * (8 * 8 + 2 * 8 + 4 * 16) + 2 * 4 * 8 + 4 * (2 + 2)
    assert sum(t.token_bytes for t in saved(MODEL, 2, fused_kernels=False)) == expected


def test_without_an_all_to_all_the_attention_output_is_the_projections_input() -> None:
    names = {t.name for t in saved(MODEL, 1, fused_kernels=False)}
    assert "attention output" in names and "o_proj input" not in names
    hybrid = Chunk((Slice(0, 6, 5, True), Slice(1, 0, 4, True)), padding=1)
    split = Chunk((Slice(0, 6, 10, True),))
    memory = memory_of(layout=Layout(1, 1, 1, (4,)), fused_kernels=False)
    own_rows, joined = 5 * 2 * 8 * 2, 10 * 8 * 2
    assert memory.saved_bytes(hybrid) - memory.saved_bytes(split) == own_rows + joined


@pytest.mark.parametrize(
    ("fused", "size", "token_bytes"), [(True, 2, 16 * 2), (False, 2, 16 * 6 + 16), (False, 4, 144)]
)
def test_head_norms_keep_their_inputs_and_plain_ones_more(
    fused: bool, size: int, token_bytes: int
) -> None:
    added = []
    for model in (MODEL, replace(MODEL, has_head_norms=True)):
        tensors = saved(model, 2, fused_kernels=fused, dtype_bytes=size)
        added.append(sum(t.token_bytes for t in tensors))
    assert added[1] - added[0] == token_bytes


def test_saved_tensors_have_distinct_names() -> None:
    model = replace(MODEL, has_head_norms=True)
    names = [t.name for t in saved(model, 2, fused_kernels=False)]
    assert len(set(names)) == len(names) == 21


def test_query_sized_tensors_follow_the_heads_not_the_hidden_size() -> None:
    wide_heads = replace(MODEL, head_dim=16, num_kv_heads=1)  # query 32, kv 16, hidden 8
    widths = {t.name: t.width for t in saved(wide_heads, 1)}
    assert widths["query"] == widths["attention output"] == widths["o_proj input"] == 32
    assert widths["key"] == widths["value"] == 16
    assert widths["layer input"] == widths["norm2 input"] == 8


def test_heads_are_padded_up_to_a_multiple_of_sp() -> None:
    three_heads = replace(MODEL, num_heads=3, num_kv_heads=3)
    widths = {t.name: t.width for t in saved(three_heads, 2)}
    assert widths["query"] == widths["key"] == 2 * 2 * 4  # two heads on each of two ranks
    assert widths["o_proj input"] == 3 * 4  # the padding is gone after the second all-to-all


def test_fewer_kv_heads_than_ranks_are_replicated() -> None:
    grouped = replace(MODEL, num_heads=4, head_dim=2, num_kv_heads=2)
    widths = {t.name: t.width for t in saved(grouped, 4)}
    assert widths["key"] == 4 * 1 * 2
    memory = memory_of(grouped, Layout(1, 4, 1, (4,)))
    assert memory.arena_bytes(10) == 10 * 2 * 1 * 2 * 2  # rows, K and V, one head of 2, two bytes


def test_eq_5_a_batched_chunk_keeps_its_own_keys_and_values() -> None:
    chunk = Chunk((Slice(0, 0, 5, True), Slice(1, 0, 2, True)), padding=1)
    assert memory_of().saved_bytes(chunk) == 8 * 208 // 2 + 8 * 16


def test_eq_5_a_split_slices_keys_and_values_are_in_the_arena() -> None:
    memory = memory_of()
    assert memory.saved_bytes(Chunk((Slice(0, 0, 6, False),))) == 6 * 208 // 2
    assert memory.arena_bytes(10) == 10 * 16


def test_eq_5_shorts_and_padding_beside_a_slice_keep_theirs() -> None:
    hybrid = Chunk((Slice(0, 6, 5, True), Slice(1, 0, 4, True)), padding=1)
    assert memory_of().saved_bytes(hybrid) == 10 * 208 // 2 + (4 + 1) * 16


def test_eq_9_a_recomputed_layer_keeps_its_input_only() -> None:
    memory = memory_of()
    for chunk in (whole(0, 6), Chunk((Slice(0, 0, 6, False),))):
        assert memory.input_bytes(chunk) == 6 * 8 * 2 // 2
        assert memory.output_bytes(0, chunk) == 3 * 2 * 4 * 2  # cos and sin of a head
        assert (
            memory.output_bytes(1, chunk) == 3 * (8 + 2 * 4) * 2
        )  # and the gradient of the output


def test_eq_10_held_bytes_are_saved_layers_recomputed_layers_and_the_output() -> None:
    chunk = whole(0, 6)
    saved, kept_input = 6 * 208 // 2 + 6 * 16, 6 * 8
    assert memory_of().held_bytes(0, chunk, 1) == 2 * saved + kept_input + 3 * 16


@pytest.mark.parametrize(("size", "gradient_size"), [(2, 4), (4, 4), (8, 8)])
def test_key_value_gradients_are_accumulated_in_float32_or_wider(
    size: int, gradient_size: int
) -> None:
    memory = memory_of(dtype_bytes=size)
    assert memory.kv_grad_bytes(10) == 10 * 2 * 1 * 4 * gradient_size


def test_eq_6_zero_3_states_are_sharded_with_a_bucket_and_two_layers_gathered() -> None:
    layer, embedding = 640, 32 * 8
    first, last = memory_of().static_bytes
    assert first == (3 * layer + embedding) * 18 // 2 + 2 * layer + 2 * 2 * layer
    assert last == (layer + embedding) * 18 // 2 + 2 * layer + 2 * (layer + embedding)


def test_eq_6_without_zero_states_are_whole() -> None:
    layer, embedding = 640, 32 * 8
    assert memory_of(zero_stage=0).static_bytes == (
        (3 * layer + embedding) * 18,
        (layer + embedding) * 18,
    )
    float32 = memory_of(dtype_bytes=4, zero_stage=0)
    assert float32.static_bytes[0] == (3 * layer + embedding) * 16  # weights are the masters


def test_eq_6_a_single_stage_has_embedding_and_head() -> None:
    memory = memory_of(layout=Layout(1, 1, 1, (4,)), zero_stage=0)
    assert memory.static_bytes == ((4 * 640 + 2 * 256) * 18,)


def test_eq_6_a_middle_stage_of_one_layer_gathers_that_layer_alone() -> None:
    memory = memory_of(layout=Layout(3, 1, 1, (2, 1, 1)))
    assert memory.static_bytes[1] == 640 * 18 + 2 * 640  # one rank gathers nothing
    assert memory_of(layout=Layout(3, 2, 1, (2, 1, 1))).static_bytes[1] == 320 * 18 + 4 * 640


def test_zero_3_collects_at_most_fifty_million_gradients() -> None:
    assert reduce_bucket_elements(MODEL) == 640
    assert reduce_bucket_elements(BUILTIN_MODELS["llama-30b"]) == 50_000_000


def test_eq_6_float32_parameters_have_float32_masters_under_zero_3() -> None:
    memory = memory_of(layout=Layout(3, 1, 1, (2, 1, 1)), dtype_bytes=4)
    assert memory.state_bytes[1] == 640 * 20 + 640 * 4


def test_eq_6_masters_and_moments_may_be_cut_over_the_replicas_too() -> None:
    whole = setup_of(MODEL, Layout(3, 1, 2, (2, 1, 1)))
    cut = whole.run_with(shards_optimizer_over_dp=True)
    bucket = 2 * 640
    assert state_bytes(cut, 1) == 640 * (2 + 4 + (4 + 8) // 2) + bucket
    assert state_bytes(whole, 1) == 640 * 18 + bucket
    assert state_bytes(replace(cut, layout=replace(cut.layout, dp=1)), 1) == 640 * 18 + bucket
    assert state_bytes(cut.run_with(offloads_optimizer=True), 1) == 640 * 2 + bucket


@pytest.mark.parametrize(
    ("name", "gib"), [("llama-7b", 5.2), ("llama-13b", 9.4), ("llama-30b", 21.2)]
)
def test_eq_6_gives_the_documented_model_states(name: str, gib: float) -> None:
    """They count two layers' gradients at all times, and no bucket."""
    model = BUILTIN_MODELS[name]
    static = MemoryModel(setup_of(model, make_layout(model, 4, 8))).static_bytes[0]
    documented = static - 2 * 50_000_000 + 2 * 2 * model.layer_params
    assert documented / 2**30 == pytest.approx(gib, abs=0.06)


HIDDEN = 3 * 8 * 2  # of six tokens on one of two ranks


def test_recomputing_all_layers_adds_one_layers_activations_while_it_runs() -> None:
    memory, chunk = memory_of(zero_stage=0), whole(0, 6)
    rebuilt = (6 * 208 // 2 + 6 * 16) - 6 * 8
    backward = memory.backward_transient(0, chunk, 0)
    assert memory.backward_transient(0, chunk, 3) == backward + rebuilt


def test_a_recomputed_layer_below_a_kept_one_needs_nothing_more() -> None:
    memory, chunk = memory_of(), whole(0, 6)
    for transient in (memory.forward_transient, memory.backward_transient):
        assert transient(0, chunk, 2) == transient(0, chunk, 0)


def test_a_forward_without_graph_has_the_widest_moment_of_the_mlp() -> None:
    memory, chunk = memory_of(), whole(0, 6)
    assert memory.forward_transient(0, chunk, 0) == HIDDEN
    # residual and norm output, the former where the output will be, and three of 16 elements
    assert memory.forward_transient(0, chunk, 3) == HIDDEN + 3 * 3 * 16 * 2


def test_logits_of_one_block_live_in_the_last_forward() -> None:
    chunk = whole(0, 6)  # three tokens on each rank
    head = 3 * HIDDEN + 3 * 8 * 4 + 256 * 4  # final norm, weight gradient
    token = 32 * 2 + 32 * 4 + 8 * 4  # its logits; scratch in float32 for them and the hidden state
    assert memory_of(block=2).forward_transient(1, chunk, 0) == head + 2 * token
    assert memory_of(block=1024).forward_transient(1, chunk, 0) == head + 3 * token
    assert memory_of(block=2).forward_transient(0, chunk, 0) == HIDDEN
    float32 = memory_of(block=2, dtype_bytes=4)  # no copies
    assert float32.forward_transient(1, chunk, 0) == 2 * (3 * HIDDEN) + 2 * 32 * 4 + 256 * 4


def test_a_logit_costs_one_element_but_for_a_scratch_of_fixed_size() -> None:
    setup = setup_of(replace(MODEL, vocab_size=2**17), LAYOUT)
    assert logits_bytes(setup.run_with(dtype_bytes=4), 1024) == 1024 * 2**17 * 4
    assert logits_bytes(setup, 1024) == 1024 * 2**17 * 2 + 2**20 * 4 + 1024 * 8 * 4
    assert logits_bytes(setup, 2048) == 2048 * 2**17 * 2 + 2**20 * 4 + 2048 * 8 * 4
    # a row is widened whole, however long
    wide = replace(setup, model=replace(MODEL, vocab_size=2**21))
    assert logits_bytes(wide, 4) == 2**23 * 2 + 2**21 * 4 + 4 * 8 * 4


def test_logits_and_a_recomputed_layer_do_not_coincide() -> None:
    memory, chunk = memory_of(block=2), whole(0, 6)
    assert memory.forward_transient(1, chunk, 1) == memory.forward_transient(1, chunk, 0)


def test_backward_workspace_has_the_mlps_gradients_or_the_attentions() -> None:
    memory = memory_of(zero_stage=0)
    mlp = 2 * 3 * 16 * 2  # three tokens a rank, two of gate, up and product
    assert memory.backward_transient(0, whole(0, 6), 0) == mlp
    far = Chunk((Slice(0, 100, 6, False),))
    # gradients of residual, output twice and query; K and V of all rows; the MLP's tensors gone
    attention = 4 * HIDDEN + (100 + 6) * 16 - 3 * (2 * 8 + 3 * 16) * 2
    assert memory.backward_transient(0, far, 0) == attention


def test_under_zero_3_a_layers_weight_gradients_are_whole_until_they_are_reduced() -> None:
    plain, memory, chunk = memory_of(zero_stage=0), memory_of(), whole(0, 600)
    for where, weights in ((chunk, 8 * 16), (Chunk((Slice(0, 10**4, 600, False),)), 3 * 128 + 64)):
        more = memory.backward_transient(1, where, 0) - plain.backward_transient(1, where, 0)
        assert more == 2 * weights


def test_under_zero_3_few_tokens_need_the_room_of_a_layers_gradients_and_their_buckets() -> None:
    chunk = whole(0, 2)
    rebuilt = (208 + 2 * 16) - 16
    assert memory_of().backward_transient(1, chunk, 0) == 2 * 2 * 640 - rebuilt
    assert memory_of().backward_transient(1, chunk, 1) == 2 * 2 * 640


def test_under_zero_3_the_first_stage_ends_with_the_gradient_of_its_embedding() -> None:
    memory, chunk = memory_of(replace(MODEL, vocab_size=10**4)), whole(0, 6)
    assert memory.held_bytes(0, chunk, 3) == 3 * HIDDEN + memory.output_bytes(0, chunk)
    assert memory.backward_transient(0, chunk, 0) == 8 * 10**4 * 2 - 2 * HIDDEN


@pytest.mark.parametrize("context", [2, 10, 30, 200])
@pytest.mark.parametrize("recompute", [0, 1, 2, 3])
def test_a_tails_backward_is_counted_at_its_fullest_layer(context: int, recompute: int) -> None:
    """Layer by layer from the top: its dK and dV come, and what it kept goes."""
    memory = memory_of(zero_stage=0)
    tail, middle = (Chunk((Slice(0, context, 8, is_tail),)) for is_tail in (True, False))
    gradients, inputs = memory.kv_grad_bytes(context), memory.input_bytes(tail)
    kept = [memory.saved_bytes(tail)] * (3 - recompute) + [inputs] * recompute
    fullest = max((i + 1) * gradients + sum(kept[i:]) for i in range(3))
    counted = 3 * gradients + sum(kept) + memory.backward_transient(0, tail, recompute)
    counted -= memory.backward_transient(0, middle, recompute)
    assert counted >= fullest
    if recompute in (0, 3):
        assert counted == fullest


def test_eq_8_whole_sequences_pile_up_until_their_backward() -> None:
    memory, chunks = memory_of(), [whole(0, 6), whole(1, 4), whole(2, 2)]
    held = [memory.held_bytes(0, c, 0) for c in chunks]
    transient = [memory.backward_transient(0, c, 0) for c in chunks]
    two_alive = [(F, 0), (F, 1), (B, 0), (F, 2), (B, 1), (B, 2)]
    assert (
        activations_peak(memory, 0, two_alive, chunks, [0] * 3) == held[0] + held[1] + transient[0]
    )
    one_alive = [(F, 0), (B, 0), (F, 1), (B, 1), (F, 2), (B, 2)]
    assert activations_peak(memory, 0, one_alive, chunks, [0] * 3) == held[0] + transient[0]


def test_eq_8_counts_the_stages_own_layers() -> None:
    memory, order = memory_of(replace(MODEL, vocab_size=1), block=1), [(F, 0), (B, 0)]
    chunk = whole(0, 6)
    saved = memory.saved_bytes(chunk)
    for stage, layers in ((0, 3), (1, 1)):
        transients = (memory.forward_transient, memory.backward_transient)
        expected = layers * saved + memory.output_bytes(stage, chunk)
        expected += max(t(stage, chunk, 0) for t in transients)
        assert activations_peak(memory, stage, order, [chunk], [0]) == expected


def test_eq_8_peaks_in_the_last_stages_forward_where_the_logits_outweigh_a_backward() -> None:
    memory, chunk = memory_of(zero_stage=0), whole(0, 6)
    expected = memory.held_bytes(1, chunk, 0) + memory.forward_transient(1, chunk, 0)
    assert memory.forward_transient(1, chunk, 0) > memory.backward_transient(1, chunk, 0)
    assert activations_peak(memory, 1, [(F, 0), (B, 0)], [chunk], [0]) == expected


def test_the_arena_of_a_whole_sequence_is_there_from_the_first_slices_forward() -> None:
    memory = memory_of()
    chunks = [Chunk((Slice(0, 0, 4, False),)), Chunk((Slice(0, 4, 8, True),))]
    only_first = activations_peak(memory, 0, [(F, 0)], chunks, [0, 0])
    transient = memory.forward_transient(0, chunks[0], 0)
    assert only_first == 3 * 12 * 16 + memory.held_bytes(0, chunks[0], 0) + transient


def test_key_value_gradients_are_there_from_the_tails_backward() -> None:
    memory = memory_of()
    chunks = [Chunk((Slice(0, 0, 4, False),)), Chunk((Slice(0, 4, 8, True),))]
    arena, gradients = 3 * 12 * 16, 3 * 4 * 32
    held = [memory.held_bytes(0, c, 0) for c in chunks]
    forwards = [(F, 0), (F, 1)]
    forward = memory.forward_transient(0, chunks[1], 0)
    assert activations_peak(memory, 0, forwards, chunks, [0, 0]) == arena + sum(held) + forward
    tail = memory.backward_transient(0, chunks[1], 0)
    assert (
        activations_peak(memory, 0, [*forwards, (B, 1)], chunks, [0, 0])
        == arena + sum(held) + gradients + tail
    )


def test_key_value_gradients_are_made_once_for_all_slices_before_the_tail() -> None:
    memory = memory_of()
    chunks = [Chunk((Slice(0, 4 * i, 4, i == 2),)) for i in range(3)]
    chunks.append(whole(1, 400))  # so big that the peak is at its forward
    order = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (F, 3)]
    held = memory.held_bytes(0, chunks[0], 0) + memory.held_bytes(0, chunks[3], 0)
    expected = 3 * 12 * 16 + 3 * 8 * 32 + held + memory.forward_transient(0, chunks[3], 0)
    assert activations_peak(memory, 0, order, chunks, [0] * 4) == expected


def test_arena_and_key_value_gradients_outlive_the_tail_and_end_with_the_first_slice() -> None:
    """A big whole sequence at three moments shows what else is alive there."""
    memory = memory_of()
    chunks = [Chunk((Slice(0, 0, 4, False),)), Chunk((Slice(0, 4, 8, True),)), whole(1, 400)]
    arena, gradients = 3 * 12 * 16, 3 * 4 * 32
    held = [memory.held_bytes(0, c, 0) for c in chunks]
    big = held[2] + memory.backward_transient(0, chunks[2], 0)
    run_big = [(F, 2), (B, 2)]
    before_tail = [(F, 0), (F, 1), *run_big, (B, 1), (B, 0)]
    between = [(F, 0), (F, 1), (B, 1), *run_big, (B, 0)]
    after_first = [(F, 0), (F, 1), (B, 1), (B, 0), *run_big]
    none = [0, 0, 0]
    assert activations_peak(memory, 0, before_tail, chunks, none) == arena + held[0] + held[1] + big
    assert activations_peak(memory, 0, between, chunks, none) == arena + gradients + held[0] + big
    assert activations_peak(memory, 0, after_first, chunks, none) == big


def test_two_cut_sequences_have_an_arena_each() -> None:
    memory = memory_of()
    chunks = [Chunk((Slice(s, start, 4, start == 4),)) for s in (0, 1) for start in (0, 4)]
    order = [(F, 0), (F, 1), (F, 2)]
    held = sum(memory.held_bytes(0, c, 0) for c in chunks[:3])
    expected = 2 * 3 * 8 * 16 + held + memory.forward_transient(0, chunks[2], 0)
    assert activations_peak(memory, 0, order, chunks, [0] * 4) == expected


def test_recomputing_all_layers_of_the_first_chunk_leaves_its_inputs_and_one_layer() -> None:
    memory, chunks = memory_of(), [whole(0, 60), whole(1, 4)]
    order = [(F, 0), (F, 1), (B, 0), (B, 1)]
    hidden = 60 * 8
    expected = (
        (3 * hidden + memory.output_bytes(0, chunks[0]))
        + memory.held_bytes(0, chunks[1], 0)
        + (memory.saved_bytes(chunks[0]) - hidden)
        + memory.backward_transient(0, chunks[0], 0)
    )
    assert activations_peak(memory, 0, order, chunks, [3, 0]) == expected


def test_recompute_counts_may_be_a_mapping_by_chunk_id() -> None:
    memory, chunks = memory_of(), [whole(0, 60), whole(1, 4)]
    order = [(F, 1), (B, 1)]
    assert peak_bytes(memory, 0, order, chunks, {1: 2}) == peak_bytes(
        memory, 0, order, chunks, [0, 2]
    )


def test_other_instructions_of_a_stream_change_nothing() -> None:
    memory, chunks = memory_of(), [whole(0, 6)]
    stream = [Instruction.parse(text) for text in ("RECV_F0", "F0", "RECV_B0", "B0", "STEP")]
    order = [(i.op, i.chunk) for i in stream]
    assert peak_bytes(memory, 1, order, chunks, [0]) == peak_bytes(
        memory, 1, [(F, 0), (B, 0)], chunks, [0]
    )


def test_an_idle_stage_needs_its_states_only() -> None:
    memory = memory_of()
    assert peak_bytes(memory, 0, [], [], []) == memory.static_bytes[0]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    recompute=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_recomputing_more_never_raises_the_peak_of_the_order_beyond_one_layer(
    lengths: list[int], recompute: list[int]
) -> None:
    memory = memory_of()
    chunks = [whole(i, n, -n % 2) for i, n in enumerate(lengths)]
    order = [(F, i) for i in range(len(chunks))] + [(B, i) for i in reversed(range(len(chunks)))]
    some = peak_bytes(memory, 0, order, chunks, recompute)
    more = peak_bytes(memory, 0, order, chunks, [min(3, c + 1) for c in recompute])
    one_layer = max(memory.saved_bytes(c) - memory.input_bytes(c) for c in chunks)
    assert more <= some + one_layer
    if all(recompute[: len(chunks)]):
        assert more <= some


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("fused", [True, False])
def test_eq_8_a_full_window_at_the_token_capacity_fits_every_stage_closely(
    k: int, fused: bool
) -> None:
    model = BUILTIN_MODELS["llama-13b"]
    layout, limit = make_layout(model, 4, 8), 40 * 2**30
    memory = memory_of(model, layout, fused_kernels=fused)
    capacity = memory.token_capacity(k, limit) // 8 * 8
    peaks = []
    for stage in range(4):
        chunks = [whole(i, capacity) for i in range(1, 4 - stage)]
        chunks += [Chunk((Slice(0, i * capacity, capacity, i == k - 1),)) for i in range(k)]
        order = [(F, i) for i in range(len(chunks))] + [
            (B, i) for i in reversed(range(len(chunks)))
        ]
        layers = [layout.stage_layers[stage]] * len(chunks)
        peaks.append(peak_bytes(memory, stage, order, chunks, layers))
    assert max(peaks) <= limit
    assert max(peaks) > 0.75 * limit  # the others in the window have no arena here


def test_no_token_fits_where_the_states_do_not() -> None:
    assert memory_of().token_capacity(1, memory_of().static_bytes[0] - 1) == 0


def test_parameters_kept_gathered_add_all_but_two_layers_where_any_are_gathered() -> None:
    kept = memory_of(keeps_gathered=True)
    # embedding 256 and three layers of 640 elements; the other stage has only a layer and the head
    added = [a - b for a, b in zip(kept.static_bytes, memory_of().static_bytes, strict=True)]
    assert added == [2 * (256 + 3 * 640 - 2 * 640), 0]
    for layout, zero_stage in ((make_layout(MODEL, 2, 1), 3), (LAYOUT, 0)):
        kept = memory_of(layout=layout, zero_stage=zero_stage, keeps_gathered=True)
        assert kept.static_bytes == memory_of(layout=layout, zero_stage=zero_stage).static_bytes


HALF, WEIGHTS = Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
STASHED = 2 * (4 * 8 + 2 * 8 + 2 * 8 + 3 * 16)  # of a token in one layer, over both ranks


def test_a_split_backward_stashes_inputs_and_output_gradients_of_the_projections() -> None:
    memory, chunk = memory_of(), whole(0, 6)
    assert stashed_token_bytes(setup_of(MODEL, LAYOUT)) == STASHED
    assert memory.stash_bytes(0, chunk) == 3 * 3 * STASHED + HIDDEN  # and of the embedding
    assert memory.stash_bytes(1, chunk) == 3 * STASHED
    wide = replace(MODEL, head_dim=16, num_kv_heads=1)  # query 32, kv 16
    assert stashed_token_bytes(setup_of(wide, LAYOUT)) == 2 * (4 * 8 + 2 * 32 + 2 * 16 + 3 * 16)


def test_key_and_value_gradients_are_stashed_as_the_projections_have_them() -> None:
    """Fewer heads than ranks are replicated after the projection, odd ones padded."""
    for heads, kv_heads in ((4, 2), (3, 3)):
        model = replace(MODEL, num_heads=heads, head_dim=4, num_kv_heads=kv_heads)
        expected = 2 * (4 * 8 + 2 * 4 * heads + 2 * 4 * kv_heads + 3 * 16)
        assert stashed_token_bytes(setup_of(model, LAYOUT)) == expected


def test_an_input_gradient_keeps_the_product_and_what_it_stashes() -> None:
    memory, chunk = memory_of(), whole(0, 6)
    saved = memory.saved_bytes(chunk)
    assert memory.input_figures(chunk) == (
        3 * STASHED - saved,
        saved - HIDDEN,
        0,
        3 * 3 * 16 * 2,  # three tokens a rank: gradients of gate, up and product
    )
    far = Chunk((Slice(0, 100, 6, False),))
    kept = 3 * (2 * 8 + 3 * 16) * 2
    attention = 4 * HIDDEN + (100 + 6) * 16 - 3 * (2 * 8 + 3 * 16) * 2 + kept
    assert memory.input_figures(far)[3] == attention


def test_an_input_gradient_is_largest_at_the_first_or_last_layer_of_either_kind() -> None:
    memory = memory_of(layout=Layout(1, 2, 1, (4,)))
    for chunk in (whole(0, 6), Chunk((Slice(0, 4, 8, True),)), Chunk((Slice(0, 4, 8, False),))):
        growth, rebuilt, absent, workspace = memory.input_figures(chunk)
        for recompute in range(5):
            alive, most = 0, []
            for layer in range(4):
                is_recomputed = layer >= 4 - recompute
                later = (3 - layer) * absent
                most.append(alive + (rebuilt if is_recomputed else 0) + workspace - later)
                alive += growth + (rebuilt if is_recomputed else 0)
            assert memory.input_transient(0, chunk, recompute) == max(most)


def test_a_first_slices_input_gradient_frees_arena_and_gradients_layer_by_layer() -> None:
    memory, chunk = memory_of(), Chunk((Slice(0, 0, 4, False),))
    growth, *others = memory.input_figures(chunk)
    assert memory.input_figures(chunk, 100) == (growth - 100, *others)


def test_eq_8_a_stash_lies_from_the_input_gradient_to_the_weight_gradients() -> None:
    memory, chunks = memory_of(), [whole(0, 6), whole(1, 6)]
    held, stash = memory.held_bytes(0, chunks[0], 0), memory.stash_bytes(0, chunks[0])
    transient = memory.input_transient(0, chunks[1], 0)
    late = [(F, 0), (HALF, 0), (F, 1), (HALF, 1), (WEIGHTS, 0), (WEIGHTS, 1)]
    assert activations_peak(memory, 0, late, chunks, [0, 0]) == stash + max(
        held + transient, stash + memory.weight_transient(0, chunks[1])
    )
    soon = [(F, 0), (HALF, 0), (WEIGHTS, 0), (F, 1), (HALF, 1), (WEIGHTS, 1)]
    assert activations_peak(memory, 0, soon, chunks, [0, 0]) == max(
        held + transient, stash + memory.weight_transient(0, chunks[1])
    )


def test_a_split_tail_leaves_its_arena_and_its_gradients_to_the_first_slice() -> None:
    memory = memory_of()
    chunks = [Chunk((Slice(0, 0, 4, False),)), Chunk((Slice(0, 4, 8, True),))]
    order = [(F, 0), (F, 1), (HALF, 1), (HALF, 0), (WEIGHTS, 1), (WEIGHTS, 0)]
    arena, gradients = 3 * memory.arena_bytes(12), 3 * memory.kv_grad_bytes(4)
    held = [memory.held_bytes(0, chunk, 0) for chunk in chunks]
    stash = [memory.stash_bytes(0, chunk) for chunk in chunks]
    moments = [
        arena + held[0] + memory.forward_transient(0, chunks[0], 0),
        arena + sum(held) + memory.forward_transient(0, chunks[1], 0),
        arena + sum(held) + gradients + memory.input_transient(0, chunks[1], 0),
        arena
        + held[0]
        + gradients
        + stash[1]
        + memory.input_transient(0, chunks[0], 0, (arena + gradients) // 3),
        sum(stash) + memory.weight_transient(0, chunks[1]),
    ]
    assert activations_peak(memory, 0, order, chunks, [0, 0]) == max(moments)


def test_fp8_products_need_their_rounded_operands_and_a_scratch_or_the_result() -> None:
    # 4 x 8 and 6 x 8 bytes rounded; float32 of either, or a result of 4 x 6 elements of 2 bytes
    assert fp8_product_bytes(4, 6, 8, 2) == 4 * 8 + max(
        4 * 8 * 4, 6 * 8 + max(4 * 6 * 8, 2 * 4 * 6)
    )
    # the scratch is no more than 2^20 elements, the result outgrows it
    many = 2**20
    assert fp8_product_bytes(many, 64, 64, 2) == many * 64 + 64 * 64 + 2 * many * 64


def test_fp8_adds_to_what_runs_and_nothing_to_what_is_kept() -> None:
    plain, fp8 = memory_of(), memory_of(fp8=True)
    assert plain.static_bytes == fp8.static_bytes
    for chunk in (whole(0, 6), whole(0, 600), Chunk((Slice(0, 8, 8, True),))):
        assert plain.held_bytes(0, chunk, 1) == fp8.held_bytes(0, chunk, 1)
        for recompute in range(4):
            for name in ("forward_transient", "backward_transient"):
                before, after = (getattr(m, name)(0, chunk, recompute) for m in (plain, fp8))
                assert after >= before
    down = fp8_product_bytes(300, 8, 16, 2)
    assert fp8.forward_transient(0, whole(0, 600), 0) == down - 300 * 8 * 2
