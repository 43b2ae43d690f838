"""Measure the links between ranks by the transfers that training makes over them.

All ranks take part, and all pairs or groups transfer at once, as in training. Ranks of one host
are a node.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.predict.fit import Link, LinkRow

__all__ = ["NodeShape", "profile_links"]

_LEAST_BYTES = 4 * 2**10
_MOST_BYTES = 256 * 2**20
_GROWTH = 4
_SURE_BYTES = 16 * 2**20
"""Sizes up to this one are measured in any case: below, latency may hide the bandwidth."""
_LEAST_REPEATS, _MOST_REPEATS = 5, 50

Transfer = Callable[[int], Callable[[], None]]
"""Of a number of bytes, what to time."""


@dataclass(frozen=True)
class _Job:
    """A transfer, the part of its bytes that counts, and how often they cross the link."""

    link: Link
    transfer: Transfer
    share: float
    crossings: int = 1


@dataclass(frozen=True)
class NodeShape:
    """How the ranks lie in the nodes."""

    num_nodes: int
    ranks_per_node: int


def profile_links(
    *, device: torch.device, budget_s: float, sp: int | None = None, host: str | None = None
) -> tuple[NodeShape, list[LinkRow]]:
    """Times of transfers of 4 KiB and more between the ranks, the same on all; a collective.

    Collectives run in groups of `sp` neighbouring ranks, by default all of a node. What there are
    too few ranks or nodes for is left out. `host` replaces this machine's name. Takes about
    `budget_s` seconds. Raises ConfigError on all ranks where nodes have unequal numbers of ranks,
    or `sp` does not divide them.
    """
    shape = _nodes(host or socket.gethostname())
    sp = shape.ranks_per_node if sp is None else sp
    if not 1 <= sp <= shape.ranks_per_node or shape.ranks_per_node % sp:
        raise ConfigError(
            f"--sp {sp}: it has to divide the {shape.ranks_per_node} ranks of a node, as "
            "collectives are measured inside a node only"
        )
    jobs = _jobs(shape, sp, device)
    rows: list[LinkRow] = []
    for job in jobs:
        rows += [
            LinkRow(job.link, round(job.share * size), seconds / job.crossings)
            for size, seconds in _sizes(job.transfer, device, budget_s / len(jobs))
        ]
    return shape, rows


def _nodes(host: str) -> NodeShape:
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    names = list(dict.fromkeys(hosts))
    counts = {name: hosts.count(name) for name in names}
    if len(set(counts.values())) > 1 or hosts != sorted(hosts, key=names.index):
        listed = ", ".join(f"{count} on {name}" for name, count in counts.items())
        raise ConfigError(
            f"the ranks are {listed}: start equally many on every node, numbered node by node"
        )
    return NodeShape(len(names), counts[names[0]])


def _jobs(shape: NodeShape, sp: int, device: torch.device) -> list[_Job]:
    rank, local = dist.get_rank(), shape.ranks_per_node
    jobs = []
    if local > 1:
        to = _partner(rank % local, local)
        jobs.append(_Job(Link.HOP, _hand_over(to, rank, device), 1.0, 2))
    if shape.num_nodes > 1:
        to = local * _partner(rank // local, shape.num_nodes)
        jobs.append(_Job(Link.NODE_HOP, _hand_over(to, rank, device), float(local), 2))
    # every rank makes every group, as torch wants it
    groups = [
        dist.new_group(list(range(first, first + sp)))
        for first in range(0, dist.get_world_size(), sp)
    ]
    if sp > 1:
        share, pg = (sp - 1) / sp, groups[rank // sp]
        jobs.append(_Job(Link.GATHER, _gather(pg, sp, device), share))
        jobs.append(_Job(Link.REDUCE, _reduce(pg, sp, device), share))
        jobs.append(_Job(Link.ALL_TO_ALL, _all_to_all(pg, sp, device), share))
    return jobs


def _partner(place: int, places: int) -> int:
    """Distance to the other one of a pair of neighbours; 0 for the last of an odd number."""
    if place % 2:
        return -1
    return 1 if place + 1 < places else 0


def _hand_over(distance: int, rank: int, device: torch.device) -> Transfer:
    """There and back again."""

    def make(size: int) -> Callable[[], None]:
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)

        def run() -> None:
            if distance > 0:
                dist.send(buffer, rank + distance)
                dist.recv(buffer, rank + distance)
            elif distance < 0:
                dist.recv(buffer, rank + distance)
                dist.send(buffer, rank + distance)

        return run

    return make


def _gather(pg: Any, sp: int, device: torch.device) -> Transfer:
    def make(size: int) -> Callable[[], None]:
        whole, mine = _buffers(size, sp, device)
        return lambda: _done(dist.all_gather_into_tensor(whole, mine, group=pg))

    return make


def _reduce(pg: Any, sp: int, device: torch.device) -> Transfer:
    def make(size: int) -> Callable[[], None]:
        whole, mine = _buffers(size, sp, device)
        return lambda: _done(dist.reduce_scatter_tensor(mine, whole, group=pg))

    return make


def _all_to_all(pg: Any, sp: int, device: torch.device) -> Transfer:
    def make(size: int) -> Callable[[], None]:
        sent, _ = _buffers(size, sp, device)
        received = torch.empty_like(sent)
        return lambda: _done(dist.all_to_all_single(received, sent, group=pg))

    return make


def _buffers(size: int, sp: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of about `size` bytes in all, and one rank's share; float32, which is reduced as well."""
    mine = torch.zeros(size // 4 // sp, device=device)
    return torch.zeros(mine.numel() * sp, device=device), mine


def _done(work: Any) -> None:
    if work is not None:
        work.wait()


def _sizes(transfer: Transfer, device: torch.device, budget_s: float) -> list[tuple[int, float]]:
    """(bytes, lower quartile of the slowest rank's seconds) of growing sizes within the time."""
    found: list[tuple[int, float]] = []
    size, left_s = _LEAST_BYTES, budget_s
    while size <= _MOST_BYTES:
        run = transfer(size)
        started = time.monotonic()
        once_s = max(_slowest(run, 2, device))  # the first transfer of a size allocates
        repeats = int(budget_s / 12 / once_s)
        times = _slowest(run, max(_LEAST_REPEATS, min(_MOST_REPEATS, repeats)), device)
        # what else runs on the machine only adds to a transfer's time
        found.append((size, statistics.quantiles(times, n=4)[0]))
        left_s -= _agreed([time.monotonic() - started])[0]
        size *= _GROWTH
        next_s = _GROWTH * _LEAST_REPEATS * found[-1][1]
        if size > _SURE_BYTES and next_s > left_s:
            break
    return found


def _slowest(run: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each repetition on the rank that took longest; ranks start together."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        _settle(device)
        started = time.perf_counter()
        run()
        _settle(device)
        times.append(time.perf_counter() - started)
    return _agreed(times)


def _agreed(times: list[float]) -> list[float]:
    longest = torch.tensor(times, dtype=torch.float64)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, longest)
    return torch.stack(everyone).amax(dim=0).tolist()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
