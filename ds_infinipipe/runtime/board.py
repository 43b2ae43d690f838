"""Keys in the rendezvous store, for when collectives no longer work.

The store is served by one of the ranks, and most calls of its client have no timeout: where that
rank's process is frozen they would wait for ever. So they run in a thread that can be left behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as torch_dist

from ds_infinipipe.runtime.faults import transport_reason
from ds_infinipipe.runtime.sockets import connected_sockets

__all__ = ["Board", "connect_to_store"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_ANSWER_S = 10.0


def connect_to_store(timeout_s: float) -> torch_dist.Store:
    """A client of its own: the default one may be inside a blocking call of another thread."""
    store = torch_dist.distributed_c10d._get_default_store().clone()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class Board:
    """A part of the store, by prefix, with questions that may find the store gone."""

    def __init__(self, prefix: str, timeout_s: float) -> None:
        """`timeout_s` bounds the wait for an answer, which is never longer than 10 s."""
        self._timeout_s = min(timeout_s, _ANSWER_S)
        self._store = torch_dist.PrefixStore(prefix, connect_to_store(timeout_s))
        self._port = getattr(self._store._underlying_non_prefix_store, "port", None)
        self._has_answered = True

    def is_there(self) -> bool:
        """False once the process that serves the store has gone, or has not answered in time."""
        if not self._has_answered:
            return False
        ours = [s for s in connected_sockets() if s.ports[1] == self._port]
        return all(connection.is_open() for connection in ours)

    def ask(
        self, question: Callable[[torch_dist.Store], Answer], timeout_s: float | None = None
    ) -> Answer | None:
        """None where the store has gone, or does not answer in time."""
        # asking would print a trace
        if not self.is_there():
            return None
        answers: list[Answer] = []

        def ask() -> None:
            try:
                answers.append(question(self._store))
            except RuntimeError as error:
                logger.debug("the store is gone: %s", transport_reason(error))

        thread = threading.Thread(target=ask, name="store", daemon=True)
        thread.start()
        thread.join(self._timeout_s if timeout_s is None else timeout_s)
        self._has_answered = bool(answers)
        return answers[0] if answers else None

    def read(self, key: str) -> str | None:
        """The text under a key; None where there is none, or no store."""
        return self.ask(lambda store: store.get(key).decode() if store.check([key]) else None)

    def write_first(self, key: str, text: str) -> str | None:
        """Write unless another rank has; the text that stands now."""
        return self.ask(lambda store: store.compare_set(key, "", text).decode())

    def count(self, key: str, more: int) -> int | None:
        """Add to a number that starts at zero; its value now."""
        return self.ask(lambda store: store.add(key, more))
