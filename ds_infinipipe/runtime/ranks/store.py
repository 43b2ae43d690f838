"""What ranks tell each other where collectives no longer work: keys in the rendezvous store.

The store is served by one of the ranks, and most calls of its client have no timeout: where that
rank's process is frozen they would wait for ever. So they run in a thread that can be left behind.

A rank that fails inside a collective leaves its peers blocked in it. It announces why, and then the
connections are cut: a peer that wakes up with a broken connection reads here what to make of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as torch_dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from ds_infinipipe.errors import PeerTimeoutError
from ds_infinipipe.runtime.ranks.faults import transport_reason
from ds_infinipipe.runtime.ranks.sockets import connected_sockets

__all__ = ["Board", "SideChannel", "connect_to_store"]

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_ANSWER_S = 10.0
_POLL_S = 0.25
_MEETING_POLL_S = 0.02
# A rank whose transport does not notice that its peer has given up comes when its own wait on it
# times out: a meeting waits longer than that, as a multiple of it.
_LATE = 1.25
_LINGER_S = 5.0
_CLOSE_S = 2.0


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
    """Announcements and meetings of all ranks, numbered by `round`.

    With `on_announcement` a thread listens and calls it with the round when another rank announces
    something, for communicators whose peers do not notice that one end is gone.
    """

    def __init__(
        self, timeout_s: float, on_announcement: Callable[[int], None] | None = None
    ) -> None:
        self._rank, self._world_size = torch_dist.get_rank(), torch_dist.get_world_size()
        self._timeout_s = timeout_s
        store = connect_to_store(timeout_s)
        # every rank builds its engines in one order
        number = store.add(f"infinipipe/engines/{self._rank}", 1)
        self.store = PrefixStore(f"infinipipe/{number}/", store)
        self._board = Board(f"infinipipe/{number}/", timeout_s)
        self.round = 0
        self._attempts = 0
        self._heard: tuple[int, str] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if on_announcement is not None:
            mine = self.store.clone()  # type: ignore[attr-defined]
            self._thread = threading.Thread(
                target=self._listen, args=(mine, on_announcement), name="side-channel", daemon=True
            )
            self._thread.start()

    def begin(self) -> None:
        """Forget who failed before: all ranks begin something together."""
        self._attempts += 1

    def announce(self, text: str) -> None:
        """Tell every rank; the first announcement of a round stands."""
        self._board.write_first(self._key("announced"), text)
        if self._thread is not None:
            time.sleep(2 * _POLL_S)  # so that no rank is aborted before it has heard why

    def announced(self) -> str | None:
        """This round's announcement, if there is one."""
        heard = self._heard
        if heard is not None and heard[0] == self.round:
            return heard[1]
        return self._board.read(self._key("announced"))

    def failed(self) -> str | None:
        """Which rank said since `begin` that it failed, and why."""
        return self._board.read(self._failure_key)

    def linger(self) -> None:
        """Give the other ranks time to read the announcement; the store may die with this one."""
        with contextlib.suppress(PeerTimeoutError):
            self._meet("", _LINGER_S)

    def meet(self, mine: str) -> list[str]:
        """Wait for all ranks and exchange a text; starts the next round.

        Raises PeerTimeoutError where a rank does not come in time, or says that it cannot.
        """
        return self._meet(mine, _LATE * self._timeout_s)

    def _meet(self, mine: str, timeout_s: float) -> list[str]:
        key, keys = self._key("arrived"), range(self._world_size)
        self._ask(lambda store: store.set(f"{key}/{self._rank}", mine))
        deadline = time.monotonic() + timeout_s
        while not self._ask(lambda store: store.check([f"{key}/{rank}" for rank in keys])):
            self._check_meeting(key, deadline, timeout_s)
            time.sleep(_MEETING_POLL_S)
        return self._ask(lambda store: [store.get(f"{key}/{rank}").decode() for rank in keys])

    def _ask(self, question: Callable[[Store], Answer]) -> Answer:
        answer = self._board.ask(lambda store: (question(store),), self._timeout_s)
        if answer is None:
            raise PeerTimeoutError(
                "meeting the other ranks after one ran out of memory failed: the rank that serves "
                "the rendezvous store, most often rank 0, ended or does not answer; look at the "
                "first rank that failed"
            )
        return answer[0]

    def next_round(self) -> None:
        """Forget this round's announcement."""
        self.round += 1

    def fail(self, reason: str) -> None:
        """Tell ranks that wait in `meet` that this one will not come; the first one stands."""
        self._board.write_first(self._failure_key, f"rank {self._rank}: {reason}")

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _check_meeting(self, key: str, deadline: float, timeout_s: float) -> None:
        failed = self.failed()
        if failed is not None:
            raise PeerTimeoutError(
                "the step cannot be repeated after running out of memory, as another rank failed: "
                f"{failed}"
            )
        if time.monotonic() > deadline:
            ranks = range(self._world_size)
            missing = self._ask(lambda s: [r for r in ranks if not s.check([f"{key}/{r}"])])
            reason = (
                f"ranks {missing} did not come within {timeout_s:g} s to repeat a step that "
                "ran out of memory"
            )
            self.fail(reason)
            raise PeerTimeoutError(f"{reason}; look at the first rank that failed")

    def _listen(self, store: Store, on_announcement: Callable[[int], None]) -> None:
        while not self._closed.wait(_POLL_S):
            number = self.round
            if self._heard is not None and self._heard[0] == number:
                continue
            try:
                text = self._read(store, number)
            except RuntimeError as error:
                logger.debug("no longer listening: %s", transport_reason(error))
                return
            if text is not None:
                self._heard = number, text
                on_announcement(number)

    def _read(self, store: Store, number: int) -> str | None:
        key = f"{number}/announced"
        return store.get(key).decode() if store.check([key]) else None

    @property
    def _failure_key(self) -> str:
        return self._key(f"{self._attempts}/failed")

    def _key(self, name: str) -> str:
        return f"{self.round}/{name}"
