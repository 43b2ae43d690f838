"""What ranks tell each other where collectives no longer work: keys in the rendezvous store.

The store is served by one of the ranks, and most calls of its client have no timeout: where that
rank's process is frozen they would wait for ever. So they run in a thread that can be left behind.

A rank that fails inside a collective leaves its peers blocked in it. It announces why, and then the
connections are cut: a peer that wakes up with a broken connection reads here what to make of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as torch_dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ds_infinipipe.runtime.ranks.faults import transport_reason
from ds_infinipipe.runtime.ranks.sockets import connected_sockets

__all__ = ["Board", "SideChannel", "connect_to_store"]

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_ANSWER_S = 10.0
_POLL_S = 0.25
_CLOSE_S = 2.0
_ANNOUNCED = "announced"


def connect_to_store(timeout_s: float) -> Store:
    """A client of its own: the default one may be inside a blocking call of another thread."""
    default: Any = _get_default_store()
    store: Store = default.clone()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class Board:
    """A part of the store, by prefix, with questions that may find the store gone."""

    def __init__(self, prefix: str, timeout_s: float) -> None:
        """`timeout_s` bounds the wait for an answer, which is never longer than 10 s."""
        self._timeout_s = min(timeout_s, _ANSWER_S)
        self._store = PrefixStore(prefix, connect_to_store(timeout_s))
        served = self._store._underlying_non_prefix_store  # type: ignore[attr-defined]
        self._port = getattr(served, "port", None)
        self._has_answered = True

    def is_there(self) -> bool:
        """False once the process that serves the store has gone, or has not answered in time."""
        if not self._has_answered:
            return False
        ours = [s for s in connected_sockets() if s.ports[1] == self._port]
        return all(connection.is_open() for connection in ours)

    def ask(
        self, question: Callable[[Store], Answer], timeout_s: float | None = None
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


class SideChannel:
    """Announcements and failures that ranks tell each other without a collective.

    With `on_announcement` a thread listens and calls it when another rank announces something, for
    communicators whose peers do not notice that one end is gone.
    """

    def __init__(self, timeout_s: float, on_announcement: Callable[[], None] | None = None) -> None:
        self._rank = torch_dist.get_rank()
        store = connect_to_store(timeout_s)
        # every rank builds its engines in one order
        number = store.add(f"infinipipe/engines/{self._rank}", 1)
        prefix = f"infinipipe/{number}/"
        self._board = Board(prefix, timeout_s)
        self._watched = 0
        self._heard: str | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if on_announcement is not None:
            mine = PrefixStore(prefix, store)
            self._thread = threading.Thread(
                target=self._listen, args=(mine, on_announcement), name="side-channel", daemon=True
            )
            self._thread.start()

    def begin(self) -> None:
        """Forget which rank failed before: all ranks begin something together."""
        self._watched += 1

    def announce(self, text: str) -> str:
        """Tell every rank what ends them all; the announcement that stands, which is the first."""
        return self._board.write_first(_ANNOUNCED, text) or text

    def wait_until_heard(self) -> None:
        """Give ranks that listen time to hear why, before they are aborted."""
        if self._thread is not None:
            time.sleep(2 * _POLL_S)

    def announced(self) -> str | None:
        """The announcement, if there is one."""
        return self._heard or self._board.read(_ANNOUNCED)

    def fail(self, reason: str) -> None:
        """Note that this rank failed; the first one stands."""
        self._board.write_first(self._failure_key, f"rank {self._rank}: {reason}")

    def failed(self) -> str | None:
        """Which rank said since `begin` that it failed, and why."""
        return self._board.read(self._failure_key)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _listen(self, store: Store, on_announcement: Callable[[], None]) -> None:
        while self._heard is None and not self._closed.wait(_POLL_S):
            try:
                if store.check([_ANNOUNCED]):
                    self._heard = store.get(_ANNOUNCED).decode()
            except RuntimeError as error:
                logger.debug("no longer listening: %s", transport_reason(error))
                return
        if self._heard is not None:
            on_announcement()

    @property
    def _failure_key(self) -> str:
        return f"{self._watched}/failed"
