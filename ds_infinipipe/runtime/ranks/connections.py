"""Connections between ranks: made in one order, and cut by a rank that ends with an error.

A rank takes its device before its first collective, which torch binds to the device it finds. NCCL
connects a group when it is made, if torch knows the process's device, else at its first use: a
rendezvous of its ranks' hosts, which may wait for each other for ever.

A rank that fails inside a collective leaves its peers blocked in it. NCCL can abort communicators,
in the steps of torch's own abort of all groups. Gloo cannot: nothing but a closed connection ends a
wait, so its connections are shut down, which wakes both sides at once.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.launcher import ALLOCATOR_SETTINGS
from ds_infinipipe.runtime.ranks.faults import naming_peer_failures
from ds_infinipipe.runtime.ranks.sockets import Socket, connected_sockets

__all__ = [
    "abort_nccl",
    "connect_nccl",
    "has_nccl",
    "note_connections",
    "take_device",
    "wake_others",
]

# connections belong to the process, not to an engine
_connections: list[Socket] = []


def take_device() -> None:
    """Make the device of this rank, by its number on the node, the current one, and its allocator.

    Chunks differ in size every step, which fragments the default allocator; what the user chose
    stays. Raises ConfigError where the node has fewer devices than ranks.
    """
    accelerator = get_accelerator()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if accelerator.device_name() == "cuda":
        if local_rank >= accelerator.device_count():
            raise ConfigError(
                f"LOCAL_RANK is {local_rank}, but this node has {accelerator.device_count()} GPUs: "
                "start at most one rank for each"
            )
        if not (os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")):
            torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS)
    accelerator.set_device(local_rank)


def connect_nccl(device: torch.device) -> None:
    """Connect the groups of NCCL that are not, in the order they were made; a collective."""
    for pg in distributed_c10d._world.pg_names:
        backend = _nccl_backend(pg)
        if backend is not None and pg.bound_device_id is None:
            pg.bound_device_id = device
            backend.eager_connect_single_device(device)


def note_connections() -> None:
    """Remember the connections to other ranks that there are now; a collective over all ranks.

    Those are what two ranks have the two ends of, but for the rendezvous store's, where a rank
    that ends still says why.
    """
    store: Any = distributed_c10d._get_default_store()
    port = getattr(getattr(store, "_underlying_non_prefix_store", store), "port", None)
    ours = [s for s in connected_sockets() if port not in s.ports]
    ends: list[list[tuple[int, int]]] = [[]] * torch_dist.get_world_size()
    with naming_peer_failures("exchanging the ranks' connections"):
        torch_dist.all_gather_object(ends, [s.ports for s in ours])
    me = torch_dist.get_rank()
    theirs = {tuple(pair) for rank, pairs in enumerate(ends) if rank != me for pair in pairs}
    _connections[:] = [s for s in ours if s.ports[::-1] in theirs]


def wake_others() -> None:
    """End what other ranks wait for this one for; no group can be used afterwards."""
    for connection in _connections:
        connection.shut_down()
    abort_nccl()


def has_nccl() -> bool:
    """Whether any process group communicates by NCCL."""
    return any(_nccl_backend(pg) is not None for pg in distributed_c10d._world.pg_names)


def abort_nccl() -> None:
    """Abort all communicators of NCCL, newest first; what waits for one ends with an error."""
    names = distributed_c10d._world.pg_names
    groups = [pg for pg in names if _nccl_backend(pg) is not None]
    if not groups:
        return
    # aborted one by one, communicators could wait for each other
    first: Any = _nccl_backend(groups[0])
    first._group_start()
    for pg in sorted(groups, key=lambda pg: names[pg], reverse=True):
        pg.abort()
    first._group_end()


def _nccl_backend(pg: Any) -> Any:
    if torch.device("cuda") not in getattr(pg, "_device_types", ()):
        return None
    backend = pg._get_backend(torch.device("cuda"))
    return backend if backend.name() == "nccl" else None
