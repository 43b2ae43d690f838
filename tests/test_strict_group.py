"""The tests' own process group computes what gloo does, and shows what gloo hides."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def _collectives(rank: int) -> list[torch.Tensor]:
    """Results of every kind of collective that the package uses, with odd sizes."""
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    given = torch.rand(size, 7, generator=generator, dtype=torch.float64)
    part, whole = given[0].clone(), torch.empty(size * 7, dtype=torch.float64)
    results = []
    dist.all_gather_into_tensor(whole, part)
    results.append(whole.clone())
    dist.all_to_all_single(whole, given.view(-1))
    results.append(whole.clone())
    dist.reduce_scatter_tensor(part, given.view(-1))
    results.append(part.clone())
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        if operation != dist.ReduceOp.AVG or dist.get_backend() != "gloo":
            total = given.clone()
            dist.all_reduce(total, operation)
            results.append(total)
    dist.broadcast(given, src=size - 1)
    results.append(given)
    gathered: list = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "odd": "x" * rank})
    results.append(torch.tensor([len(g["odd"]) + g["rank"] for g in gathered]))
    flags = torch.tensor([rank == 1, True])
    dist.all_reduce(flags.byte(), dist.ReduceOp.MAX)
    dist.barrier()
    return results


def test_collectives_give_what_gloo_gives() -> None:
    strict, gloo = (run_ranks(_collectives, 3, backend=b) for b in ("strict", "gloo"))
    for mine, theirs in zip(strict, gloo, strict=True):
        average = mine.pop(5)
        torch.testing.assert_close(average, theirs[3] / 3)
        torch.testing.assert_close(mine, theirs, rtol=1e-15, atol=0.0)


def _in_different_orders(rank: int) -> None:
    value, whole = torch.ones(4), torch.ones(2, 4)
    if rank == 0:
        dist.all_reduce(value)
        dist.all_gather_into_tensor(whole, value)
    else:
        dist.all_gather_into_tensor(whole, value)
        dist.all_reduce(value)


def _in_different_sizes(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + rank))


@pytest.mark.parametrize("fn", [_in_different_orders, _in_different_sizes])
def test_members_that_do_not_agree_are_named(fn: Callable[[int], None]) -> None:
    with pytest.raises(RuntimeError, match=r"do not agree .*rank 0: all_reduce .*; rank 1: all_"):
        run_ranks(fn, 2, backend="strict")


def _both_send_first(rank: int, groups: int) -> float:
    """Each sends and then receives, over one communicator or over one for each direction."""
    ways = [dist.new_group([0, 1], timeout=timedelta(seconds=1)) for _ in range(groups)]
    value = torch.full((3,), float(rank))
    sent = dist.isend(torch.full((3,), float(rank)), 1 - rank, ways[rank % groups])
    dist.recv(value, 1 - rank, ways[(1 - rank) % groups])
    sent.wait()
    return float(value[0])


def test_sends_of_both_sides_meet_only_on_communicators_of_their_own() -> None:
    assert run_ranks(_both_send_first, 2, 1, backend="gloo") == [1.0, 0.0]
    assert run_ranks(_both_send_first, 2, 2, backend="strict") == [1.0, 0.0]
    with pytest.raises(RuntimeError, match="timed out: receive"):
        run_ranks(_both_send_first, 2, 1, backend="strict")


def _return_from_a_send_that_nobody_takes(rank: int) -> bool:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 1:
        return True
    return dist.isend(torch.ones(2), 1, group).is_completed()


def test_a_send_is_complete_once_it_is_received() -> None:
    run = _return_from_a_send_that_nobody_takes
    assert run_ranks(run, 2, backend="strict") == [False, True]
    with pytest.raises(RuntimeError, match="timed out: connection of 0 to 1"):
        run_ranks(run, 2, backend="lazy")


def _change_in_flight(rank: int) -> None:
    given = torch.ones(3)
    work = dist.all_gather_into_tensor(torch.empty(6), given, async_op=True)
    given[1] = 2.0
    work.wait()


def _read_early(rank: int) -> bool:
    whole = torch.zeros(6)
    work = dist.all_gather_into_tensor(whole, torch.ones(3), async_op=True)
    early = bool(whole.isnan().all())
    work.wait()
    return early and bool((whole == 1.0).all())


def test_what_is_touched_before_it_is_waited_for_shows() -> None:
    assert run_ranks(_read_early, 2, backend="strict") == [True, True]
    with pytest.raises(RuntimeError, match=r"an input of all_gather .* was changed in flight"):
        run_ranks(_change_in_flight, 2, backend="strict")


def _many_sends(rank: int) -> float:
    total, value = 0.0, torch.empty(5)
    for step in range(100):
        if rank == 0:
            dist.send(torch.full((5,), float(step)), 1)
        elif rank == 1:
            dist.recv(value, 0)
            total += float(value.sum())
    dist.barrier()
    return total


def test_more_transfers_than_there_is_room_for_arrive_though_others_look_away() -> None:
    assert run_ranks(_many_sends, 3, backend="strict")[1] == 5.0 * sum(range(100))
