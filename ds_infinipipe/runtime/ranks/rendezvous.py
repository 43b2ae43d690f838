"""How the ranks find each other, also when torchrun starts them again after a crash."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from ds_infinipipe.errors import PeerTimeoutError

__all__ = ["JOINING_METHOD", "agree_on_start"]

JOINING_METHOD = "infinipipe-env://"
"""`init_method` of the process group: the launcher's environment, with keys of this start only.

torchrun keeps one store for all restarts, with any of its rendezvous backends. Ranks that start
again would find the addresses of dead ones there, and wait for them or fail.
"""

_POLL_S = 0.1


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
