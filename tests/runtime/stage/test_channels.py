"""Transfers between stages: any shape, kept order, damage noticed, silence reported."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ds_infinipipe.errors import PeerTimeoutError
from ds_infinipipe.runtime.stage.channels import Channel, Channels

pytestmark = pytest.mark.ranks

_CPU = torch.device("cpu")


def _channel(rank: int, timeout_s: float = 20.0, verify: bool = False) -> Channel:
    timeout = timedelta(seconds=timeout_s)
    pg = dist.new_group([0, 1], timeout=timeout)
    return Channel("activation", 1 - rank, pg, timeout, verify)


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
            dist.isend(part, dst=1, group=channel.pg).wait()
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
    channel = _channel(rank, timeout_s=0.5)
    if rank == 0:
        time.sleep(3.0)
        return ""
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


@dataclass(frozen=True)
class _Stage:
    """What `Channels.connect` asks of a rank."""

    stage: int
    num_stages: int
    device: torch.device = _CPU

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1


def _first_uses(rank: int, connects: bool) -> list[float]:
    """One chunk through stages, its gradient's receive posted before the chunk is sent."""
    stages = dist.get_world_size()
    groups = {
        (edge, way): dist.new_group([edge, edge + 1], timeout=timedelta(seconds=2))
        for edge in range(stages - 1)
        for way in ("activation", "gradient")
    }

    def channel(way: str, peer: int) -> Channel:
        pg = groups.get((min(rank, peer), way))
        return Channel(way, peer, pg, timedelta(seconds=2))

    channels = Channels(
        channel("activation", rank - 1),
        channel("activation", rank + 1),
        channel("gradient", rank + 1),
        channel("gradient", rank - 1),
    )
    if connects:
        channels.connect(_Stage(rank, stages))  # type: ignore[arg-type]
    value = torch.zeros(2)
    if rank > 0:
        channels.activations_in.post_receive(0, (2,), torch.float32, _CPU)
    if rank < stages - 1:
        channels.gradients_in.post_receive(0, (2,), torch.float32, _CPU)
    if rank > 0:
        value = channels.activations_in.wait(0)
    if rank < stages - 1:
        channels.activations_out.send(0, value + 1)
        value = channels.gradients_in.wait(0)
    if rank > 0:
        channels.gradients_out.send(0, value + 10)
    channels.drain()
    return value.tolist()


def test_connected_channels_do_not_hold_up_their_first_use() -> None:
    """Receives posted ahead hang where a pair connects at its first transfer, unless it has."""
    assert run_ranks(_first_uses, 4, True, backend="lazy")[0] == [33.0, 33.0]
    with pytest.raises(
        PeerTimeoutError, match=r"posting the receive of the (gradient|activation) of chunk 0"
    ):
        run_ranks(_first_uses, 2, False, backend="lazy")


def test_a_receive_starts_on_a_stream_of_its_own_and_is_used_on_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams are those of a GPU; without one the calls are recorded."""
    calls: list[object] = []

    class Handle:
        def wait(self, *limits: object) -> None:
            calls.append(("wait", *limits))

    @contextmanager
    def stream(used: object) -> Iterator[None]:
        calls.append(("enter", used))
        yield
        calls.append(("leave", used))

    def receive(buffer: torch.Tensor, **_: object) -> Handle:
        calls.append("post")
        return Handle()

    monkeypatch.setattr("torch.cuda.stream", stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: "compute")
    monkeypatch.setattr("torch.distributed.irecv", receive)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, used: calls.append(used))
    own: Any = "receives"
    channel = Channel("activation", 1, None, timedelta(seconds=1), receive_stream=own)
    channel.post_receive(3, (2,), torch.float32, _CPU)
    assert calls == [("enter", "receives"), "post", ("leave", "receives")]
    channel.wait(3)
    assert calls[3:] == [("wait",), "compute"]
