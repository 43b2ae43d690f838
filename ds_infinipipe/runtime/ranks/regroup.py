"""Cuts the connections of process groups whose ranks are stuck in a collective, and renews them.

A ProcessGroup is a handle that finds its backend by device type. Everyone who holds one, DeepSpeed
in dozens of places, keeps it: only the backend behind it is replaced, by one with connections and
counters of its own.

NCCL can abort its communicators. Gloo cannot: nothing but a closed connection ends a wait, and the
backend's destructor waits for what is running. So a gloo group first gets a backend built here,
whose sockets are known; shutting them down ends every wait on either side at once.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ds_infinipipe.errors import ConfigError, InfiniPipeError
from ds_infinipipe.runtime.ranks.sockets import Socket, connected_sockets, socket_inodes

__all__ = ["GroupSet", "cut_connections", "open_gloo_group"]

# A group keeps its backends by a number of eight bits, and never lets go of one. The first few are
# torch's own kinds.
_FIRST_KIND, _LAST_KIND = 32, 255

# Process groups belong to the process, not to an engine, and so do these: the number of a group's
# last backend, and its sockets.
_kinds: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_sockets: WeakKeyDictionary[ProcessGroup, list[Socket]] = WeakKeyDictionary()


def open_gloo_group(ranks: Sequence[int] | None, timeout: timedelta) -> Any:
    """A new gloo group, all ranks where `ranks` is None, that `cut_connections` can cut."""
    before = socket_inodes()
    pg = torch_dist.new_group(ranks=ranks, backend="gloo", timeout=timeout)
    if isinstance(pg, ProcessGroup):
        _sockets[pg] = list(connected_sockets(before))
    return pg


def cut_connections() -> None:
    """End what other ranks wait for in known gloo groups, for a process that is about to end."""
    for connection in itertools.chain.from_iterable(_sockets.values()):
        connection.shut_down()


class GroupSet:
    """The process groups that a step uses: all there are now, but for those in `kept`.

    Not for groups that another thread uses beside training.
    """

    def __init__(self, kept: Sequence[Any]) -> None:
        self._groups = [pg for pg in distributed_c10d._world.pg_names if pg not in kept]
        self._lock = threading.Lock()
        self._generation = 0
        self._is_aborted = False

    @property
    def backends(self) -> set[str]:
        """Names of the backends in use, such as "gloo"."""
        return {b.name() for pg in self._groups for b, _ in _backends(pg)}

    def adopt(self, store: Store) -> None:
        """Give gloo groups backends whose connections can be cut; a collective over all ranks."""
        for pg in self._groups:
            if pg not in _sockets and any(b.name() == "gloo" for b, _ in _backends(pg)):
                _renew(pg, PrefixStore("adopt/", store))

    def abort(self, generation: int) -> None:
        """End what any thread waits for in the groups; nothing happens once they are renewed.

        Only backends that can be aborted and connections that are known, see `adopt`.
        """
        with self._lock:
            if self._is_aborted or generation != self._generation:
                return
            self._is_aborted = True
            _abort_nccl(self._groups)
            for connection in itertools.chain.from_iterable(
                _sockets.get(pg, ()) for pg in self._groups
            ):
                connection.shut_down()

    def renew(self, store: Store) -> None:
        """Connect the ranks again after `abort`; a collective over all ranks.

        Raises RuntimeError of the transport where a rank does not come.
        """
        with self._lock:
            self._generation += 1
            # left behind by an error inside a batch of collectives
            distributed_c10d._world.pg_coalesce_state.clear()
            for pg in self._groups:
                _renew(pg, PrefixStore(f"renewed/{self._generation}/", store))
            self._is_aborted = False


def _backends(pg: ProcessGroup) -> list[tuple[Any, list[torch.device]]]:
    """Each backend of a group with the devices it serves."""
    found: list[tuple[Any, list[torch.device]]] = []
    for device in pg._device_types:
        backend = pg._get_backend(device)
        for other, devices in found:
            if other is backend:
                devices.append(device)
                break
        else:
            found.append((backend, [device]))
    return found


def _renew(pg: ProcessGroup, store: Store) -> None:
    name = distributed_c10d._world.pg_names[pg]
    for backend, devices in _backends(pg):
        kind = _kinds[pg] = _kinds.get(pg, _FIRST_KIND - 1) + 1
        if kind > _LAST_KIND:
            raise InfiniPipeError(
                f"process group {name} was renewed {_LAST_KIND - _FIRST_KIND} times, more than "
                "torch can number: restart from the last checkpoint with a smaller "
                "infinipipe.planner.memory_limit_gib"
            )
        fresh = _connect(pg, backend, PrefixStore(f"{name}/{devices[0]}/", store))
        for device in devices:
            pg._register_backend(device, ProcessGroup.BackendType(kind), fresh)


def _connect(pg: ProcessGroup, backend: Any, store: Store) -> Any:
    old = backend.options
    if backend.name() == "nccl":
        options = torch_dist.ProcessGroupNCCL.Options()
        options._timeout = old._timeout
        options.is_high_priority_stream = old.is_high_priority_stream
        options.global_ranks_in_group = old.global_ranks_in_group
        options.group_name = old.group_name
        return torch_dist.ProcessGroupNCCL(store, pg.rank(), pg.size(), options)
    before = socket_inodes()
    fresh = torch_dist.ProcessGroupGloo(store, pg.rank(), pg.size(), timeout=old._timeout)
    fresh.options.global_ranks_in_group = old.global_ranks_in_group
    fresh.options.group_name = old.group_name
    _sockets[pg] = _mutual(list(connected_sockets(before)), pg, store)
    return fresh


def _mutual(opened: Sequence[Socket], pg: ProcessGroup, store: Store) -> list[Socket]:
    """Of the sockets that appeared while a group was connected, those between its ranks.

    Other threads may open connections of their own at the same time.
    """
    store.set(f"ports/{pg.rank()}", json.dumps([s.ports for s in opened]))
    peers = [rank for rank in range(pg.size()) if rank != pg.rank()]
    theirs = {tuple(p) for rank in peers for p in json.loads(store.get(f"ports/{rank}"))}
    mutual = [s for s in opened if s.ports[::-1] in theirs]
    if len(mutual) < len(peers):
        raise ConfigError(
            f"gloo opened {len(mutual)} connections to {len(peers)} peers; to repeat steps that "
            "ran out of memory they must be open from the start: unset TORCH_GLOO_LAZY_INIT, or "
            "set infinipipe.recovery.enabled to false"
        )
    return mutual


def _abort_nccl(groups: Sequence[ProcessGroup]) -> None:
    backends = [b for pg in groups for b, _ in _backends(pg) if b.name() == "nccl"]
    if not backends:
        return
    # aborted one by one, communicators could wait for each other
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()
