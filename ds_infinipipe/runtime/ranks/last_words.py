"""What the ranks of a failed run print: one of them the error, each other a line that refers to it.

A launcher ends all ranks as soon as one has ended, and its own lines are the last. So the ranks
that refer to another speak first, and wait until that one has spoken.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeAlias, TypeVar

from ds_infinipipe.errors import PeerTimeoutError

__all__ = ["LastWords", "refer", "report_failure"]

Failure = TypeVar("Failure", bound=BaseException)

_Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_POLL_S = 0.02
_WAIT_FOR_OTHERS_S = 3.0
_WAIT_FOR_REPORT_S = 6.0


class Notes(Protocol):
    """What all ranks can read and write, answers None where it is gone. See `board.Board`."""

    def is_there(self) -> bool:
        """False once the rank that keeps them has ended."""

    def read(self, key: str) -> str | None:
        """The text under a key."""

    def write_first(self, key: str, text: str) -> str | None:
        """Write unless another rank has; the text that stands now."""

    def count(self, key: str, more: int) -> int | None:
        """Add to a number that starts at zero; its value now."""


def refer(error: Failure, rank: int) -> Failure:
    """The error, noted as one that all ranks raise and `rank` is to report."""
    vars(error)["reported_by"] = rank
    return error


def report_failure(error: BaseException, print_whole: Callable[[], object]) -> None:
    """Call `print_whole`, or write the line of a rank that refers to another."""
    hook = sys.excepthook
    if isinstance(hook, LastWords):
        hook.report(error, print_whole)
    else:
        print_whole()


class LastWords:
    """Python's hook for uncaught exceptions on a rank that has joined the others."""

    def __init__(
        self, notes: Notes, rank: int, world_size: int, wake_others: Callable[[], object]
    ) -> None:
        """`wake_others` ends what other ranks wait for this one for."""
        self._notes, self._rank, self._others = notes, rank, world_size - 1
        self._wake_others = wake_others
        before = sys.excepthook
        self._hook: _Hook = before._hook if isinstance(before, LastWords) else before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.report(error, lambda: self._hook(kind, error, trace))
        else:
            self._hook(kind, error, trace)

    def report(self, error: BaseException, print_whole: Callable[[], object]) -> None:
        """Call `print_whole` on the rank that reports `error`, and where that rank is not heard."""
        name = type(error).__name__
        reporter = getattr(error, "reported_by", None)
        if reporter == self._rank:
            self._until(lambda: self._has("said", self._others), _WAIT_FOR_OTHERS_S)
            self._lead(print_whole)
        elif reporter is not None:
            self._follow(reporter, f"rank {reporter} reports the {name}", print_whole)
        elif isinstance(error, PeerTimeoutError):
            self._blame(error, print_whole)
        else:
            self._report_own(error, print_whole)
        self._leave()

    def _report_own(self, error: BaseException, print_whole: Callable[[], object]) -> None:
        """An error that this rank did not agree on, but others may have as well."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        mine = json.dumps([self._rank, text, getattr(error, "exit_code", 1)])
        rank, cause, _ = json.loads(self._notes.write_first("cause", mine) or mine)
        if rank != self._rank and cause == text:
            self._follow(rank, f"rank {rank} reports the same {type(error).__name__}", print_whole)
            return
        self._notes.count("said", 1)
        self._lead(print_whole)
        self._wake_others()

    def _blame(self, error: PeerTimeoutError, print_whole: Callable[[], object]) -> None:
        """A peer does not answer: perhaps because it failed and said why."""
        found = self._notes.read("cause")
        if not found:  # a rank that can say why does so before its connections break
            print_whole()
            return
        rank, cause, error.exit_code = json.loads(found)
        self._follow(rank, f"rank {rank} reports {cause[:300]}", print_whole)

    def _lead(self, print_whole: Callable[[], object]) -> None:
        print_whole()
        sys.stderr.flush()
        self._notes.write_first(f"reported/{self._rank}", "yes")

    def _follow(self, rank: int, line: str, print_whole: Callable[[], object]) -> None:
        sys.stderr.write(f"rank {self._rank} ends: {line}\n")
        sys.stderr.flush()
        self._notes.count("said", 1)
        if not self._until(lambda: bool(self._notes.read(f"reported/{rank}")), _WAIT_FOR_REPORT_S):
            print_whole()

    def _leave(self) -> None:
        """The rank that serves the store stays until the others have read it."""
        self._notes.count("left", 1)
        if self._rank == 0:
            self._until(lambda: self._has("left", self._others + 1), _WAIT_FOR_OTHERS_S)

    def _has(self, key: str, number: int) -> bool:
        return (self._notes.count(key, 0) or 0) >= number

    def _until(self, holds: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or not self._notes.is_there():
                return False
            time.sleep(_POLL_S)
        return True
