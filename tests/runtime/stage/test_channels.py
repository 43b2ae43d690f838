"""Transfers between stages: any shape, kept order, damage noticed, silence reported."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ds_infinipipe.errors import PeerTimeoutError
from ds_infinipipe.runtime.stage.channels import Channel

pytestmark = pytest.mark.ranks

_CPU = torch.device("cpu")


def _channel(rank: int, timeout_s: float = 20.0, verify: bool = False) -> Channel:
    timeout = timedelta(seconds=timeout_s)
    return Channel("activation", 1 - rank, dist.group.WORLD, timeout, verify)


def _exchange_many(rank: int, verify: bool) -> bool:
    out, into = _channel(rank, verify=verify), _channel(rank, verify=verify)
    directions = [dist.new_group([0, 1]), dist.new_group([0, 1])]  # as stages have them
    out.pg, into.pg = directions[rank], directions[1 - rank]
    shapes = [(1, n, 8) for n in (5, 3, 7, 1)]
    for chunk, shape in enumerate(shapes):
        into.post_receive(chunk, shape, torch.float32, _CPU)
        out.send(chunk, torch.full(shape, float(10 * rank + chunk)))
    got = [into.wait(chunk) for chunk in (2, 0, 3, 1)]
    out.drain()
    order = (2, 0, 3, 1)
    return all(
        t.shape == shapes[c] and bool((t == 10 * (1 - rank) + c).all())
        for c, t in zip(order, got, strict=True)
    )


@pytest.mark.parametrize("backend", ["gloo", "strict"])
@pytest.mark.parametrize("verify", [False, True])
def test_both_ranks_send_and_receive_uneven_chunks_without_blocking(
    verify: bool, backend: str
) -> None:
    assert run_ranks(_exchange_many, 2, verify, timeout=30.0, backend=backend) == [True, True]


def _corrupt(rank: int) -> str:
    channel = _channel(rank, verify=True)
    if rank == 0:
        parts = channel._parts(torch.arange(6.0))
        parts[0] = parts[0].flip(0).contiguous()  # damaged on the way: same sum, other order
        for part in parts:
            dist.isend(part, dst=1).wait()
        return ""
    channel.post_receive(4, (6,), torch.float32, _CPU)
    try:
        channel.wait(4)
    except PeerTimeoutError as error:
        return str(error)
    return "not noticed"


def test_a_damaged_transfer_is_noticed_by_its_checksum() -> None:
    message = run_ranks(_corrupt, 2, timeout=30.0)[1]
    assert "chunk 4 from rank 0 arrived damaged" in message


def _silent(rank: int) -> str:
    if rank == 0:
        time.sleep(3.0)
        return ""
    channel = _channel(rank, timeout_s=0.5)
    channel.post_receive(9, (2,), torch.float32, _CPU)
    try:
        channel.wait(9)
    except PeerTimeoutError as error:
        return str(error)
    return "it did not give up"


@pytest.mark.waits
def test_a_silent_peer_is_named_with_chunk_and_time_waited() -> None:
    message = run_ranks(_silent, 2, timeout=30.0)[1]
    assert "waiting for the activation of chunk 9, peer rank 0" in message
    assert "timeout 0.5 s" in message
