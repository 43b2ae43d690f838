"""The harness that runs a function on several gloo ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
from ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks


def _sum_of_ranks(rank: int, scale: float) -> torch.Tensor:
    value = torch.tensor([scale * rank], dtype=torch.float64)
    torch.distributed.all_reduce(value)
    return value


def _fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("missing layer")
    torch.distributed.barrier()


def _die_on_rank_one(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(60)


def _sleep(rank: int) -> None:
    time.sleep(60)


def test_every_rank_takes_part_in_a_collective() -> None:
    results = run_ranks(_sum_of_ranks, 3, 2.0)
    assert [r.item() for r in results] == [6.0, 6.0, 6.0]


def test_the_first_failure_is_raised_with_the_ranks_traceback() -> None:
    with pytest.raises(KeyError, match="missing layer") as caught:
        run_ranks(_fail_on_rank_one, 2)
    assert isinstance(caught.value.__cause__, RankFailure)
    assert "rank 1" in str(caught.value.__cause__)
    assert "_fail_on_rank_one" in str(caught.value.__cause__)


def test_a_rank_that_dies_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 ended without an answer"):
        run_ranks(_die_on_rank_one, 2)
    assert time.monotonic() - started < 30


def test_ranks_that_hang_are_named_and_ended() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] in 3 s"):
        run_ranks(_sleep, 2, timeout=3)
