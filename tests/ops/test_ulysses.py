"""Tokens to heads and back, on several ranks, against attention on one."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from ds_infinipipe.ops.attention import Segments, varlen_attention
from ds_infinipipe.ops.ulysses import join_to_heads, to_heads, to_tokens

DIM = 4
SEGMENTS = Segments((0, 5, 8, 12), (0, 5, 8, 12))


def _random(num_heads: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (SEGMENTS.num_q, num_heads, DIM)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _mine(x: Tensor, rank: int) -> Tensor:
    return x.chunk(dist.get_world_size())[rank].detach().clone().requires_grad_()


def _attend(q: Tensor, k: Tensor, v: Tensor, impl: str) -> Tensor:
    return varlen_attention(q, k, v, SEGMENTS, 0.5, impl=impl)


def _check_against_dense(rank: int, head_counts: list[tuple[int, int]]) -> None:
    for num_heads, num_kv_heads in head_counts:
        whole = [_random(n, seed) for seed, n in enumerate((num_heads, num_kv_heads, num_kv_heads))]
        leaves = [t.clone().requires_grad_() for t in whole]
        expected, grad = _attend(*leaves, "naive"), _random(num_heads, 3)
        expected.backward(grad)
        mine = [_mine(t, rank) for t in whole]
        heads = [to_heads(t, dist.group.WORLD) for t in mine]
        sp = dist.get_world_size()
        assert heads[0].shape == (SEGMENTS.num_q, math.ceil(num_heads / sp), DIM)
        assert heads[1].shape == (SEGMENTS.num_q, math.ceil(num_kv_heads / sp), DIM)
        out = to_tokens(_attend(*heads, "cpu_flash"), dist.group.WORLD, num_heads)
        out.backward(_mine(grad, rank).detach())
        got = [out, *(t.grad for t in mine)]
        want = [_mine(t, rank) for t in (expected, *(t.grad for t in leaves))]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-12, atol=1e-12)


def _check_joint(rank: int, head_counts: list[tuple[int, int]]) -> None:
    for num_heads, num_kv_heads in head_counts:
        whole = [_random(n, seed) for seed, n in enumerate((num_heads, num_kv_heads, num_kv_heads))]
        one, three = ([_mine(t, rank) for t in whole] for _ in range(2))
        joint = join_to_heads(*one, dist.group.WORLD)
        separate = [to_heads(t, dist.group.WORLD) for t in three]
        grads = [_random(t.shape[1], 5) for t in separate]
        torch.autograd.backward(joint, grads)
        torch.autograd.backward(separate, grads)
        for a, b in zip(
            [*joint, *(t.grad for t in one)], [*separate, *(t.grad for t in three)], strict=True
        ):
            assert torch.equal(a, b)


class _Notes(list[str]):
    """A stopwatch that writes down when it was pressed."""

    def start(self) -> None:
        self.append("start")

    def stop(self) -> None:
        self.append("stop")


def _watched(rank: int, joins: bool) -> tuple[list[str], list[str]]:
    """What a stopwatch is told in forward and in backward, and the exchanges in between."""
    notes, exchange = _Notes(), dist.all_to_all_single

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append("exchange")
        return exchange(*args, **kwargs)

    mine = [_mine(_random(4, seed), rank) for seed in range(3)]
    with mock.patch.object(dist, "all_to_all_single", noted):
        if joins:
            heads = join_to_heads(mine[0], mine[1], mine[2], dist.group.WORLD, notes)
        else:
            heads = tuple(to_heads(t, dist.group.WORLD, notes) for t in mine)
        out = to_tokens(_attend(*heads, "cpu_flash"), dist.group.WORLD, 4, notes)
        forward = list(notes)
        notes.clear()
        out.sum().backward()
    return forward, list(notes)


@pytest.mark.ranks
@pytest.mark.parametrize("joins", [True, False])
def test_a_stopwatch_runs_exactly_while_exchanges_do(joins: bool) -> None:
    exchanges = 2 if joins else 4
    for forward, backward in run_ranks(_watched, 2, joins):
        assert forward == ["start", "exchange", "stop"] * exchanges
        assert backward == ["start", "exchange", "stop"] * exchanges


def _head_ids(rank: int, num_heads: int) -> list[float]:
    """Which heads a rank gets, when the value of head h is h + 1."""
    x = torch.arange(1.0, num_heads + 1)[None, :, None].expand(2, num_heads, DIM)
    return to_heads(x, dist.group.WORLD)[0, :, 0].tolist()


def _token_ids(rank: int) -> list[float]:
    x = torch.arange(3.0)[:, None, None].expand(3, 2, DIM) + 3 * rank
    return to_heads(x, dist.group.WORLD)[:, 0, 0].tolist()


def _round_trip(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for num_heads in (4, 7):
            x = _mine(_random(num_heads, 1, dtype), rank).detach()
            back = to_tokens(to_heads(x, dist.group.WORLD), dist.group.WORLD, num_heads)
            assert torch.equal(back, x)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sp", "head_counts"),
    [
        (2, [(8, 2), (12, 4), (28, 4), (4, 1), (3, 3), (2, 2)]),
        (4, [(8, 2), (12, 4), (28, 4), (4, 1), (5, 5), (4, 4)]),
    ],
)
def test_attention_over_ranks_equals_attention_on_one(
    sp: int, head_counts: list[tuple[int, int]]
) -> None:
    run_ranks(_check_against_dense, sp, head_counts)


@pytest.mark.ranks
@pytest.mark.parametrize("sp", [2, 4])
def test_one_all_to_all_moves_what_three_move(sp: int) -> None:
    run_ranks(_check_joint, sp, [(8, 2), (12, 4), (4, 1), (5, 5), (4, 4)])


@pytest.mark.ranks
def test_fewer_heads_than_ranks_are_repeated_for_neighbours() -> None:
    assert run_ranks(_head_ids, 4, 2) == [[1.0], [1.0], [2.0], [2.0]]


@pytest.mark.ranks
def test_heads_that_do_not_divide_are_padded_with_zeros_at_the_end() -> None:
    assert run_ranks(_head_ids, 2, 3) == [[1.0, 2.0], [3.0, 0.0]]


@pytest.mark.ranks
def test_tokens_follow_each_other_by_rank() -> None:
    assert run_ranks(_token_ids, 2) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2


@pytest.mark.ranks
def test_there_and_back_is_the_identity() -> None:
    run_ranks(_round_trip, 2)


def test_one_rank_needs_no_exchange() -> None:
    x = _random(3, 1)
    assert to_heads(x, None) is x
    assert to_tokens(x, None, 3) is x
    assert join_to_heads(x, x, x, None) == (x, x, x)
