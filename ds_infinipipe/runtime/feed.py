"""The stream of batches with one batch of look-ahead, which the next plan is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

__all__ = ["BatchFeed"]

Batch = TypeVar("Batch")


class BatchFeed(Generic[Batch]):
    """Reads batches one ahead. An error while reading ahead is raised when its batch is due."""

    def __init__(self, batches: Iterable[Any], parse: Callable[[Any], Batch]) -> None:
        self._source = batches
        self._iterator = iter(batches)
        self._parse = parse
        self._ahead: Batch | Exception | None = None

    def reads(self, batches: Iterable[Any]) -> bool:
        """True if this feed was made for that very object."""
        return self._source is batches

    @property
    def num_ahead(self) -> int:
        """Batches taken from the source that were not returned yet: 0 or 1."""
        return int(self._ahead is not None and not isinstance(self._ahead, StopIteration))

    def forget(self) -> None:
        """Drop the batch read ahead, because the source now stands elsewhere."""
        self._ahead = None

    def next(self) -> Batch:
        """The next batch; raises StopIteration at the end, and DataError for a bad batch."""
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        return self._read() if ahead is None else ahead

    def peek(self) -> Batch | None:
        """The batch after the last one returned, or None where there is none to plan for."""
        if self._ahead is None:
            try:
                self._ahead = self._read()
            except Exception as error:  # kept for the step it belongs to
                self._ahead = error
        return None if isinstance(self._ahead, Exception) else self._ahead

    def _read(self) -> Batch:
        return self._parse(next(self._iterator))
