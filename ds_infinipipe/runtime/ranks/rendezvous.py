"""How the ranks find each other, also when torchrun starts them again after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from ds_infinipipe.errors import ConfigError, PeerTimeoutError

__all__ = ["JOINING_METHOD", "agree_on_start", "choose_gloo_interface"]

JOINING_METHOD = "infinipipe-env://"
"""`init_method` of the process group: the launcher's environment, with keys of this start only.

torchrun keeps one store for all restarts, with any of its rendezvous backends. Ranks that start
again would find the addresses of dead ones there, and wait for them or fail.
"""

_POLL_S = 0.1
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a named interface


def choose_gloo_interface() -> None:
    """Let gloo connect nodes by the interface that leads to rank 0, unless the user chose one.

    Gloo takes the address of the host's name, which many images resolve to the node itself: then
    other nodes cannot reach it. Raises ConfigError where that cannot be told.
    """
    environment = os.environ
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
    master = environment.get("MASTER_ADDR", "")
    has_other_nodes = local is not None and local != environment.get("WORLD_SIZE")
    if not has_other_nodes or environment.get(_GLOO_INTERFACE):
        return
    with contextlib.suppress(OSError):
        if not _is_loopback(socket.gethostbyname(socket.gethostname())):
            return
    addresses = {name: _address_of(name) for _, name in socket.if_nameindex()}
    others = {name: a for name, a in addresses.items() if a is not None and not _is_loopback(a)}
    towards = _address_towards(master)
    names = [name for name, address in others.items() if address == towards] or [*others]
    if not names or (towards not in others.values() and len(names) > 1):
        raise ConfigError(
            f"the host name {socket.gethostname()} stands for this node alone, and which of its "
            f"interfaces ({', '.join(others) or 'none'}) leads to rank 0 at {master!r} cannot be "
            f"told: set {_GLOO_INTERFACE} to the network "
            "interface of the cluster, on every node (`ip -brief address` lists them)"
        )
    os.environ[_GLOO_INTERFACE] = names[0]


def _address_towards(host: str) -> str | None:
    """This node's own address on the way to a host; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _address_of(interface: str) -> str | None:
    """IPv4 address of a network interface, if it has one."""
    request = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _join(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
    env_url = url.replace(JOINING_METHOD, "env://")
    store, rank, world_size = next(rendezvous(env_url, timeout=timeout, **kwargs))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        start = agree_on_start(store, rank, world_size, timeout.total_seconds())
        store = PrefixStore(start, store)
    yield store, rank, world_size


def agree_on_start(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A name for this start of the ranks that no earlier start has; waits for all ranks.

    The restart counts of several nodes' agents may differ, so rank 0 numbers the starts. What
    another rank reads may be the last start's number: it takes it only if rank 0 of that start
    answers with this rank's own token. Raises PeerTimeoutError, or the store's error.
    """
    if rank == 0:
        start = f"start-{store.add('infinipipe/starts', 1)}"
        store.set("infinipipe/start", start)
        for other in range(1, world_size):
            token = store.get(f"infinipipe/{start}/here/{other}").decode()  # waits for it
            store.set(f"infinipipe/{start}/go/{other}", token)
        return start
    token, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        start = store.get("infinipipe/start").decode()
        store.set(f"infinipipe/{start}/here/{rank}", token)
        answer = f"infinipipe/{start}/go/{rank}"
        if store.check([answer]) and store.get(answer).decode() == token:
            return start
        time.sleep(_POLL_S)
    raise PeerTimeoutError(
        f"rank {rank} found no rank 0 within {timeout_s:g} s (runtime.timeout_s): look at what "
        "happened to it"
    )


register_rendezvous_handler("infinipipe-env", _join)
