"""Transfers between neighbouring stages: shapes from the plan, no metadata on the wire.

Each direction has a process group of its own and is a first-in-first-out channel between two
ranks; the verifier has proved that both ends use it in the same order, and that they cannot wait
for each other for ever. A sent tensor lives until the transport reports that it has left, or the
plan shows that the peer has it: gloo never reports without a wait. No wait has a timeout of its
own, which would hold up the host of a GPU: that of the group is the limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from ds_infinipipe.errors import PeerTimeoutError
from ds_infinipipe.runtime.ranks.faults import transport_reason
from ds_infinipipe.runtime.ranks.grid import InfiniPipeGrid
from ds_infinipipe.runtime.ranks.rank import Rank

__all__ = ["Channel", "Channels"]


@dataclass
class _Transfer:
    chunk: int
    handle: Any
    tensor: torch.Tensor
    device: torch.device | None = None
    """Where a received tensor is wanted."""


@dataclass
class Channel:
    """One direction between this rank and one peer; `verify` sends checksums along.

    With `by_host` tensors of a device travel through host memory, as gloo takes no others. Receives
    are posted from `receive_stream`, if there is one: behind all that the stream of the caller has
    queued they would start too late.
    """

    name: str
    peer: int
    pg: Any
    timeout: timedelta
    verify: bool = False
    is_synchronous: bool = False
    by_host: bool = False
    receive_stream: torch.cuda.Stream | None = None
    _sent: list[_Transfer] = field(default_factory=list)
    _posted: dict[int, list[_Transfer]] = field(default_factory=dict)
    _due: dict[int, tuple[Sequence[int], torch.dtype, torch.device]] = field(default_factory=dict)

    def connect(self, is_sender: bool, device: torch.device) -> None:
        """Send or take one element: the first use of a channel may wait for that of the peer."""
        element = torch.zeros(1, device=torch.device("cpu") if self.by_host else device)
        with self._naming(f"connecting the channel of {self.name}s"):
            if is_sender:
                torch_dist.send(element, dst=self.peer, group=self.pg)
            else:
                torch_dist.recv(element, src=self.peer, group=self.pg)

    def send(self, chunk: int, tensor: torch.Tensor) -> None:
        """Start to send; the tensor is kept alive until it has left, and must not be changed."""
        with self._naming(f"sending the {self.name} of chunk {chunk}"):
            for part in self._parts(tensor.contiguous()):
                part = part.cpu() if self.by_host else part
                handle = torch_dist.isend(part, dst=self.peer, group=self.pg)
                self._sent.append(_Transfer(chunk, handle, part))
            self._forget_finished()

    def post_receive(
        self, chunk: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Post the receive of a chunk's tensor into a fresh buffer."""
        if self.is_synchronous:
            self._due[chunk] = (shape, dtype, device)
        else:
            self._post(chunk, shape, dtype, device)

    def _post(
        self, chunk: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        place = torch.device("cpu") if self.by_host else device
        what = f"posting the receive of the {self.name} of chunk {chunk}"
        with self._naming(what), torch.cuda.stream(self.receive_stream):
            buffers = [torch.empty(tuple(shape), dtype=dtype, device=place)]
            if self.verify:
                buffers.append(torch.empty(1, dtype=torch.float64, device=place))
            self._posted[chunk] = [
                _Transfer(
                    chunk, torch_dist.irecv(buffer, src=self.peer, group=self.pg), buffer, device
                )
                for buffer in buffers
            ]

    def wait(self, chunk: int) -> torch.Tensor:
        """The tensor of a posted receive. Raises PeerTimeoutError where it does not come."""
        while chunk not in self._posted and self._due:
            due = next(iter(self._due))  # in the order of the sends
            self._post(due, *self._due.pop(due))
        transfers = self._posted.pop(chunk)
        for transfer in transfers:
            self._wait(transfer, f"waiting for the {self.name} of chunk {chunk}")
            if self.receive_stream is not None:
                # its memory belongs to the stream it was received on, and is used on this one
                transfer.tensor.record_stream(torch.cuda.current_stream(transfer.device))
        tensor = transfers[0].tensor.to(transfers[0].device)
        if self.verify:
            self._compare_checksum(chunk, tensor, transfers[1].tensor.to(tensor.device))
        return tensor

    def confirm(self, chunk: int) -> None:
        """Let go of everything sent up to and with a chunk, which the peer is known to have."""
        known = 1 + max((i for i, t in enumerate(self._sent) if t.chunk == chunk), default=-1)
        for transfer in self._sent[:known]:
            self._wait(transfer, f"letting go of the sent {self.name} of chunk {transfer.chunk}")
        del self._sent[:known]

    def drain(self) -> None:
        """Wait until everything sent has left; raises PeerTimeoutError otherwise."""
        while self._sent:
            self._wait(self._sent[0], f"waiting until a sent {self.name} is taken")
            self._sent.pop(0)

    def abandon(self) -> None:
        """Forget all transfers after an error; their peers see the connection close."""
        self._sent.clear()
        self._posted.clear()
        self._due.clear()

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, _checksum(tensor)] if self.verify else [tensor]

    def _forget_finished(self) -> None:
        while self._sent and self._sent[0].handle.is_completed():
            self._sent.pop(0).handle.wait()

    def _wait(self, transfer: _Transfer, what: str) -> None:
        with self._naming(what):
            transfer.handle.wait()

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn a transport error into one that names the peer, the chunk and the time waited."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise PeerTimeoutError(
                f"{what}, peer rank {self.peer}, for {time.monotonic() - started:.1f} s (timeout "
                f"{self.timeout.total_seconds():g} s): {transport_reason(error)}"
            ) from error

    def _compare_checksum(self, chunk: int, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        found = _checksum(tensor)
        if not torch.equal(found, expected):
            raise PeerTimeoutError(
                f"the {self.name} of chunk {chunk} from rank {self.peer} arrived damaged: checksum "
                f"{found.item():.17g}, sent {expected.item():.17g}; check the network or memory"
            )


@dataclass(frozen=True)
class Channels:
    """A rank's four channels; those beyond the ends of the pipeline are never used."""

    activations_in: Channel
    activations_out: Channel
    gradients_in: Channel
    gradients_out: Channel

    @classmethod
    def between_stages(
        cls,
        grid: InfiniPipeGrid,
        rank: Rank,
        timeout: timedelta,
        *,
        verify: bool,
        is_synchronous: bool,
    ) -> Channels:
        """Channels to the neighbouring stages of one rank."""

        def channel(name: str, other: int, pg: Any) -> Channel:
            inside = min(max(other, 0), rank.num_stages - 1)
            by_host = pg is not None and torch_dist.get_backend(pg) == "gloo"
            has_stream = rank.device.type == "cuda" and not by_host
            return Channel(
                name,
                grid.peer(inside),
                pg,
                timeout,
                verify,
                is_synchronous,
                by_host,
                torch.cuda.Stream(rank.device) if has_stream else None,
            )

        stage = rank.stage
        return cls(
            activations_in=channel("activation", stage - 1, grid.activations_in_pg),
            activations_out=channel("activation", stage + 1, grid.activations_out_pg),
            gradients_in=channel("gradient", stage + 1, grid.gradients_in_pg),
            gradients_out=channel("gradient", stage - 1, grid.gradients_out_pg),
        )

    def connect(self, rank: Rank) -> None:
        """Use each channel once, before anything can be held up by it; a collective.

        Edges behind even stages first, then the others, so that no stage waits for two at once.
        """
        after, before = (
            (self.activations_out, self.gradients_in),
            (
                self.activations_in,
                self.gradients_out,
            ),
        )
        for number in range(2):
            for parity in range(2):
                if rank.stage % 2 == parity and not rank.is_last_stage:
                    after[number].connect(number == 0, rank.device)
                if rank.stage % 2 != parity and not rank.is_first_stage:
                    before[number].connect(number == 1, rank.device)

    def drain(self) -> None:
        """Wait until all sent tensors have left."""
        self.activations_out.drain()
        self.gradients_out.drain()

    def abandon(self) -> None:
        """Forget all transfers after an error."""
        for channel in self._all():
            channel.abandon()

    def _all(self) -> tuple[Channel, ...]:
        return (self.activations_in, self.activations_out, self.gradients_in, self.gradients_out)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1).to(torch.float64)
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return (flat * weights.remainder(97.0)).sum().reshape(1)
