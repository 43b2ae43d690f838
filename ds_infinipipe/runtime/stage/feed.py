"""The stream of batches with one batch of look-ahead, which the next plan is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from ds_infinipipe.errors import DataEndError, InfiniPipeError

__all__ = ["BatchFeed", "Feeds"]

Batch = TypeVar("Batch")


class BatchFeed(Generic[Batch]):
    """Reads batches one ahead. An error while reading ahead is raised when its batch is due."""

    def __init__(self, batches: Iterable[Any], parse: Callable[[Any], Batch]) -> None:
        self.source = batches
        self._iterator = iter(batches)
        self._parse = parse
        self._ahead: Batch | Exception | None = None
        self._num_read = 0

    def reads(self, batches: Iterable[Any]) -> bool:
        """True if this feed was made for that very object."""
        return self.source is batches

    @property
    def num_ahead(self) -> int:
        """Batches taken from the source that were not returned yet: 0 or 1."""
        return int(self._ahead is not None and not isinstance(self._ahead, StopIteration))

    def forget(self) -> None:
        """Drop the batch read ahead, because the source now stands elsewhere."""
        self._ahead = None

    def next(self) -> Batch:
        """The next batch; raises DataEndError at the end, and DataError for a bad batch."""
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
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise DataEndError(
                f"the data ended after {self._num_read} batches: give an iterator with more, or as "
                "training_data a data set with __len__ and __getitem__, which begins again"
            ) from None
        self._num_read += 1
        return self._parse(batch)


class Feeds(Generic[Batch]):
    """The training data's feed, and that of batches which a loop of the user's own hands over."""

    def __init__(self, parse: Callable[[Any], Batch]) -> None:
        self._parse = parse
        self._training: BatchFeed[Batch] | None = None
        self._own: BatchFeed[Batch] | None = None

    def set_training(self, batches: Iterable[Any]) -> None:
        """Where batches come from when no others are given."""
        self._training = BatchFeed(batches, self._parse)

    def of(self, batches: Iterable[Any] | None) -> BatchFeed[Batch]:
        """The feed that reads `batches`, which goes on where it was; None is the training data."""
        # an iterator of the training data's loader goes on where the loader stands
        source = getattr(batches, "loader", batches)
        if self._training is not None and (source is None or self._training.reads(source)):
            return self._training
        if batches is not None and (self._own is None or not self._own.reads(batches)):
            self._own = BatchFeed(batches, self._parse)
        if self._own is None:
            raise InfiniPipeError(
                "train_batch() has no data: pass training_data to ds_infinipipe.initialize, or an "
                "iterator of batches to train_batch"
            )
        return self._own

    @property
    def sampler(self) -> Any:
        """What draws the training data's batches; None where it has no position to save."""
        loader = None if self._training is None else self._training.source
        return getattr(loader, "sampler", None)

    @property
    def num_ahead(self) -> int:
        """Batches of the training data that were read ahead."""
        return 0 if self._training is None else self._training.num_ahead

    def forget(self) -> None:
        """Drop what was read ahead of the training data, which now stands elsewhere."""
        if self._training is not None:
            self._training.forget()
