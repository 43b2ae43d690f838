"""The arena that carries K, V and their gradients between the slices of a sequence."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.ops.kv_arena import SequenceArena, exchange

HEADS, DIM = 2, 3
LAYERS = 2


def _mix(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """A function of the last `rows` rows that reads every row before them, as attention does."""
    weights = torch.tanh(torch.einsum("nhd,mhd->hnm", k[-rows:], k)).tril(k.shape[0] - rows)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def _leaves(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shape = (2 * LAYERS, length, HEADS, DIM)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return [r.clone().requires_grad_() for r in rows]


def _whole(leaves: list[Tensor], weight: Tensor) -> Tensor:
    length = leaves[0].shape[0]
    outs = [_mix(leaves[2 * i], leaves[2 * i + 1], length) for i in range(LAYERS)]
    return (torch.stack(outs) * weight).sum()


def _slice_loss(
    leaves: list[Tensor], arena: SequenceArena, start: int, end: int, weight: Tensor
) -> Tensor:
    outs = []
    for layer in range(LAYERS):
        k, v = leaves[2 * layer][start:end], leaves[2 * layer + 1][start:end]
        outs.append(_mix(*exchange(k, v, arena, layer, start), end - start))
    return (torch.stack(outs) * weight[:, start:end]).sum()


def _weight(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(LAYERS, length, HEADS, DIM, generator=generator, dtype=torch.float64)


def _reference(length: int) -> list[Tensor]:
    leaves = _leaves(length)
    _whole(leaves, _weight(length)).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    "bounds", [(0, 11), (0, 1, 11), (0, 4, 7, 11), (0, 10, 11), (0, 2, 3, 5, 11)]
)
def test_slices_give_the_gradients_of_the_whole_sequence(bounds: tuple[int, ...]) -> None:
    length = bounds[-1]
    leaves, arena, weight = _leaves(length), SequenceArena(length), _weight(length)
    pairs = list(itertools.pairwise(bounds))
    losses = [_slice_loss(leaves, arena, *pair, weight) for pair in pairs]
    for loss in reversed(losses):
        loss.backward()
    for leaf, expected in zip(leaves, _reference(length), strict=True):
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)
    assert arena.is_empty


def test_recompute_rewrites_the_same_rows() -> None:
    length, bounds = 9, [(0, 4), (4, 6), (6, 9)]
    leaves, arena, weight = _leaves(length), SequenceArena(length), _weight(length)
    with torch.no_grad():
        for start, end in bounds:
            _slice_loss(leaves, arena, start, end, weight)
    for start, end in reversed(bounds):
        _slice_loss(leaves, arena, start, end, weight).backward()
    for leaf, expected in zip(leaves, _reference(length), strict=True):
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)
    assert arena.is_empty


def test_torch_checkpoint_recomputes_through_the_arena() -> None:
    length, bounds = 9, [(0, 4), (4, 6), (6, 9)]
    leaves, arena, weight = _leaves(length), SequenceArena(length), _weight(length)
    losses = [
        checkpoint(_slice_loss, leaves, arena, *pair, weight, use_reentrant=False)
        for pair in bounds
    ]
    for loss in reversed(losses):
        loss.backward()
    for leaf, expected in zip(leaves, _reference(length), strict=True):
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)
    assert arena.is_empty


def test_bytes_follow_the_life_of_a_sequence() -> None:
    length, row = 8, HEADS * DIM * 8
    leaves, arena, weight = _leaves(length), SequenceArena(length), _weight(length)
    assert arena.live_bytes == 0
    first = _slice_loss(leaves, arena, 0, 3, weight)
    assert arena.live_bytes == LAYERS * 2 * length * row
    last = _slice_loss(leaves, arena, 3, 8, weight)
    assert arena.live_bytes == LAYERS * 2 * length * row
    last.backward()
    assert arena.live_bytes == LAYERS * 2 * (length + 3) * row
    first.backward()
    assert arena.live_bytes == 0


def test_layers_are_freed_one_by_one_in_the_first_slices_backward() -> None:
    leaves, arena, weight = _leaves(6), SequenceArena(6), _weight(6)
    live = []
    outs = []
    for layer in range(LAYERS):
        k, v = leaves[2 * layer][:6], leaves[2 * layer + 1][:6]
        outs.append(_mix(*exchange(k, v, arena, layer, 0), 6))
    for layer in reversed(range(LAYERS)):
        live.append(arena.live_bytes)
        (outs[layer] * weight[layer]).sum().backward()
    assert live == [2 * 2 * 6 * HEADS * DIM * 8, 2 * 6 * HEADS * DIM * 8]
    assert arena.is_empty


def test_half_precision_rows_sum_their_gradients_in_float32() -> None:
    # 256 + 1 is 256 in bfloat16: three gradients of 256, 1 and 1 need float32 to become 258
    arena = SequenceArena(3)
    rows = torch.zeros(3, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    outs = [exchange(rows[i : i + 1], rows[i : i + 1], arena, 0, i)[0] for i in range(3)]
    for out, grad in zip(reversed(outs), (256.0, 1.0, 1.0), strict=True):
        weights = torch.full(out.shape, 0.0, dtype=torch.bfloat16)
        weights[0] = grad
        (out * weights).sum().backward()
    assert rows.grad.flatten().tolist() == [258.0, 0.0, 0.0]


def test_half_precision_gradients_take_four_bytes() -> None:
    arena = SequenceArena(4)
    rows = torch.zeros(4, HEADS, DIM, dtype=torch.bfloat16, requires_grad=True)
    exchange(rows[:3], rows[:3], arena, 0, 0)
    key, value = exchange(rows[3:], rows[3:], arena, 0, 3)
    (key.sum() + value.sum()).backward()
    assert arena.live_bytes == 2 * HEADS * DIM * (4 * 2 + 3 * 4)


def test_evaluation_frees_by_clear() -> None:
    arena = SequenceArena(4)
    with torch.no_grad():
        exchange(torch.ones(4, 1, 1), torch.ones(4, 1, 1), arena, 0, 0)
    assert arena.live_bytes == 32
    arena.clear()
    assert arena.is_empty


def test_a_slice_beyond_the_sequence_is_refused() -> None:
    arena = SequenceArena(4)
    with pytest.raises(ScheduleError, match=r"rows \[0, 5\) does not fit the 4 tokens"):
        exchange(torch.ones(5, 1, 1), torch.ones(5, 1, 1), arena, 0, 0)
    assert arena.is_empty


def test_a_slice_that_leaves_a_gap_is_refused() -> None:
    arena = SequenceArena(8)
    exchange(torch.ones(2, 1, 1), torch.ones(2, 1, 1), arena, 0, 0)
    with pytest.raises(ScheduleError, match="before the one that starts at row 2"):
        exchange(torch.ones(2, 1, 1), torch.ones(2, 1, 1), arena, 0, 4)


def test_a_backward_out_of_order_is_refused() -> None:
    arena = SequenceArena(6)
    rows = torch.ones(6, 1, 1, requires_grad=True)
    outs = [exchange(rows[i : i + 2], rows[i : i + 2], arena, 0, i)[0] for i in (0, 2, 4)]
    with pytest.raises(ScheduleError, match="the one due ends at row 6"):
        outs[1].sum().backward()
    outs[2].sum().backward()
    with pytest.raises(ScheduleError, match="the one due ends at row 4"):
        outs[0].sum().backward()


def test_gradients_are_summed_in_memory_of_the_arena() -> None:
    arena = SequenceArena(5)
    for start, rows in ((0, torch.ones(3, 1, 1)), (3, torch.ones(2, 1, 1))):
        arena.write(rows, rows, 0, start)
    tail_grad, first_grad = torch.ones(5, 1, 1), torch.ones(3, 1, 1)
    arena.collect_grads(tail_grad, tail_grad, 0, 3)
    own, _ = arena.collect_grads(first_grad, first_grad, 0, 0)
    assert own.flatten().tolist() == [2.0] * 3
    # autograd may still hold the tensors it passed
    assert tail_grad.eq(1).all() and first_grad.eq(1).all()
