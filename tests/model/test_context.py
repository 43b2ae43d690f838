"""Attention of whole chunks: slices, packed sequences and padding, on one rank and on several."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.model.context import (
    ChunkContext,
    chunk_attention,
    chunk_positions,
    rank_tokens,
)
from ds_infinipipe.ops.attention import Segments, varlen_attention
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.plan.chunks import Chunk, Slice

DIM = 4
SCALE = 0.5
LENGTHS = (26, 5, 3, 7)
# sequence 0 in three slices; shorts beside the first and the last; every chunk a multiple of 4
HYBRIDS = (
    Chunk((Slice(0, 0, 8, False), Slice(1, 0, 5, True)), padding=3),
    Chunk((Slice(0, 8, 12, False),)),
    Chunk((Slice(0, 20, 6, True), Slice(2, 0, 3, True), Slice(3, 0, 7, True))),
)


def _no_rotary(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return positions.to(x.dtype), positions.to(x.dtype)


def _context(
    chunk: Chunk, arena: SequenceArena | None, pg: dist.ProcessGroup | None = None
) -> ChunkContext:
    return ChunkContext.from_chunk(
        chunk, arena, pg, rotary=_no_rotary, device="cpu", dtype=torch.float64
    )


def _sequences(num_heads: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, num_heads, DIM, generator=generator, dtype=torch.float64).requires_grad_()
        for n in LENGTHS
    ]


def _pack(sequences: list[Tensor], chunk: Chunk, filler: float) -> Tensor:
    parts = [sequences[s.sequence][s.start : s.end] for s in chunk.slices]
    return torch.cat([*parts, torch.full((chunk.padding, *parts[0].shape[1:]), filler)])


def _whole(heads: tuple[int, int]) -> list[list[Tensor]]:
    """Outputs, dQ, dK, dV of each sequence, alone and in one piece."""
    qkv = [_sequences(n, seed) for seed, n in enumerate((heads[0], heads[1], heads[1]))]
    outs = [
        varlen_attention(q, k, v, Segments((0, len(q)), (0, len(q))), SCALE, impl="naive")
        for q, k, v in zip(*qkv, strict=True)
    ]
    for out, grad in zip(outs, _sequences(heads[0], 3), strict=True):
        out.backward(grad.detach())
    return [outs, *([t.grad for t in group] for group in qkv)]


def _by_chunks(
    heads: tuple[int, int], chunks: tuple[Chunk, ...], pg: dist.ProcessGroup | None = None
) -> list[list[Tensor]]:
    """The same through `chunk_attention`; with a group, each rank holds its tokens only."""
    qkv = [_sequences(n, seed) for seed, n in enumerate((heads[0], heads[1], heads[1]))]
    grads = [g.detach() for g in _sequences(heads[0], 3)]
    sp, rank = (1, 0) if pg is None else (dist.get_world_size(pg), dist.get_rank(pg))
    arena, outs = SequenceArena(LENGTHS[0]), []
    for chunk in chunks:
        mine = rank_tokens(chunk.padded_tokens, sp, rank)
        context = _context(chunk, arena if chunk.keeps_kv else None, pg)
        local = [_pack(group, chunk, 1e3)[mine] for group in qkv]
        outs.append(chunk_attention(*local, context, 0, SCALE))
    for chunk, out in zip(reversed(chunks), reversed(outs), strict=True):
        out.backward(_pack(grads, chunk, 0.0)[rank_tokens(chunk.padded_tokens, sp, rank)])
    assert arena.is_empty
    gathered = [[torch.zeros_like(t) for t in grads], *([t.grad for t in g] for g in qkv)]
    for chunk, out in zip(chunks, outs, strict=True):
        packed = torch.zeros(chunk.padded_tokens, *out.shape[1:], dtype=out.dtype)
        packed[rank_tokens(chunk.padded_tokens, sp, rank)] = out.detach()
        start = 0
        for s in chunk.slices:
            gathered[0][s.sequence][s.start : s.end] = packed[start : start + s.length]
            start += s.length
    if pg is not None:
        for group in gathered:
            for t in group:
                dist.all_reduce(t, group=pg)
    return gathered


def _assert_equal(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    chain = itertools.chain.from_iterable
    for a, b in zip(chain(got), chain(want), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)


def _check_ranks(rank: int, head_counts: list[tuple[int, int]]) -> None:
    for heads in head_counts:
        _assert_equal(_by_chunks(heads, HYBRIDS, dist.group.WORLD), _whole(heads))


@pytest.mark.parametrize("heads", [(8, 2), (12, 4), (28, 4), (3, 3)])
def test_hybrid_chunks_equal_each_sequence_alone(heads: tuple[int, int]) -> None:
    _assert_equal(_by_chunks(heads, HYBRIDS), _whole(heads))


@pytest.mark.parametrize("cut", range(1, LENGTHS[0]))
def test_every_cut_of_a_hybrid_equals_each_sequence_alone(cut: int) -> None:
    shorts = tuple(Slice(i, 0, LENGTHS[i], True) for i in (1, 2, 3))
    chunks = (
        Chunk((Slice(0, 0, cut, False), *shorts[:2]), padding=1),
        Chunk((Slice(0, cut, LENGTHS[0] - cut, True), *shorts[2:]), padding=5),
    )
    _assert_equal(_by_chunks((4, 2), chunks), _whole((4, 2)))


def test_a_batched_chunk_equals_each_sequence_alone() -> None:
    chunk = Chunk(tuple(Slice(i, 0, n, True) for i, n in enumerate(LENGTHS)), padding=3)
    _assert_equal(_by_chunks((4, 2), (chunk,)), _whole((4, 2)))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sp", "head_counts"),
    [(2, [(8, 2), (12, 4), (28, 4), (3, 3), (4, 1)]), (4, [(8, 2), (12, 4), (28, 4), (5, 5)])],
)
def test_hybrid_chunks_over_ranks_equal_each_sequence_alone(
    sp: int, head_counts: list[tuple[int, int]]
) -> None:
    run_ranks(_check_ranks, sp, head_counts)


def test_shorts_beside_a_slice_do_not_keep_its_rows() -> None:
    chunk = HYBRIDS[0]
    q, k, v = (torch.randn(16, 2, DIM, dtype=torch.float64).requires_grad_() for _ in range(3))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        context = _context(chunk, SequenceArena(LENGTHS[0]))
        out = chunk_attention(q * 1, k * 1, v * 1, context, 0, SCALE)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    # q, two arena buffers, k and v of the 8 other tokens, two outputs, two log-sum-exps
    rows = 16 + 2 * LENGTHS[0] + 2 * 8 + 8 + 8
    assert sum(storages.values()) == 8 * (rows * 2 * DIM + 16 * 2)
    assert out.shape == q.shape


def test_positions_continue_over_slices_and_restart_for_others() -> None:
    chunk = Chunk((Slice(0, 7, 3, True), Slice(1, 0, 4, True)), padding=2)
    assert chunk_positions(chunk).tolist() == [7, 8, 9, 0, 1, 2, 3, 0, 1]


@pytest.mark.ranks
def test_every_rank_rotates_its_own_tokens() -> None:
    chunk = Chunk((Slice(0, 7, 3, True), Slice(1, 0, 4, True)), padding=1)
    assert run_ranks(_positions, 2, chunk) == [[7, 8, 9, 0], [1, 2, 3, 0]]


def _positions(rank: int, chunk: Chunk) -> list[int]:
    cos, _ = _context(chunk, SequenceArena(10), dist.group.WORLD).cos_sin
    return cos[0].int().tolist()


def test_padding_is_a_segment_of_its_own() -> None:
    context = _context(HYBRIDS[0], SequenceArena(26))
    assert context.short_segments == Segments((0, 5, 8), (0, 5, 8))
    assert context.slice_segments == Segments((0, 8), (0, 8))
    assert _context(HYBRIDS[1], SequenceArena(26)).short_segments is None


def test_tokens_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"13 tokens .* sp 4 ranks: 3 more padding tokens"):
        rank_tokens(13, 4, 0)


def test_a_cut_sequence_needs_its_arena() -> None:
    with pytest.raises(ScheduleError, match="a hybrid chunk needs the arena"):
        _context(HYBRIDS[0], None)
    with pytest.raises(ScheduleError, match="a batched chunk has no use for an arena"):
        _context(Chunk((Slice(1, 0, 5, True),)), SequenceArena(5))
