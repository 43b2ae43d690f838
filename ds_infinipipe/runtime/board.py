"""Keys in the rendezvous store, for when collectives no longer work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as torch_dist

from ds_infinipipe.runtime.faults import transport_reason
from ds_infinipipe.runtime.sockets import connected_sockets

__all__ = ["Board", "connect_to_store"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def connect_to_store(timeout_s: float) -> torch_dist.Store:
    """A client of its own: the default one may be inside a blocking call of another thread."""
    store = torch_dist.distributed_c10d._get_default_store().clone()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class Board:
    """A part of the store, by prefix, with questions that may find the store gone."""

    def __init__(self, prefix: str, store: torch_dist.Store) -> None:
        self.store = torch_dist.PrefixStore(prefix, store)
        self._port = getattr(self.store._underlying_non_prefix_store, "port", None)

    def is_there(self) -> bool:
        """False once the process that serves the store has gone."""
        ours = [s for s in connected_sockets() if s.ports[1] == self._port]
        return all(connection.is_open() for connection in ours)

    def ask(self, question: Callable[[torch_dist.Store], Answer]) -> Answer | None:
        """None where the store has gone."""
        # asking would print a trace
        if not self.is_there():
            return None
        try:
            return question(self.store)
        except RuntimeError as error:
            logger.debug("the store is gone: %s", transport_reason(error))
            return None

    def read(self, key: str) -> str | None:
        """The text under a key; None where there is none, or no store."""
        return self.ask(lambda store: store.get(key).decode() if store.check([key]) else None)

    def write_first(self, key: str, text: str) -> str | None:
        """Write unless another rank has; the text that stands now."""
        return self.ask(lambda store: store.compare_set(key, "", text).decode())

    def count(self, key: str, more: int) -> int | None:
        """Add to a number that starts at zero; its value now."""
        return self.ask(lambda store: store.add(key, more))
