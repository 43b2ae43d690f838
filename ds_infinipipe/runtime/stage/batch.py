"""One step's sequences as arrays, and the tokens of a chunk as tensors of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_infinipipe.config.section import DataSettings
from ds_infinipipe.errors import DataError
from ds_infinipipe.model.context import rank_tokens
from ds_infinipipe.planner.plan.chunks import Chunk

__all__ = ["IGNORE_INDEX", "StepBatch", "check_context_length"]

IGNORE_INDEX = -100
_PADDING_ID = 0


@dataclass(frozen=True)
class StepBatch:
    """The sequences of one optimizer step, the same on every rank.

    `labels` are already shifted: `labels[i][t]` is what position t of sequence i must predict, and
    IGNORE_INDEX at its last token; `weights` are shifted alike, and empty where all are 1.
    Sequences without any label are left out and counted.
    """

    ids: tuple[np.ndarray, ...]
    labels: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...] = ()
    num_without_label: int = 0

    @classmethod
    def from_samples(cls, samples: Iterable[Any], max_length: int, vocab_size: int) -> StepBatch:
        """Read samples: ids alone, or mappings with `input_ids` and optionally `labels` and
        `loss_weights`, one value per token, not shifted.

        Raises DataError for a malformed or over-long sample, an id outside the vocabulary, and a
        batch in which nothing can be learned.
        """
        if isinstance(samples, Mapping):
            raise DataError(
                f"a batch is a mapping with {sorted(map(str, samples))}; it must be a list of "
                "samples, each with its own input_ids, and batches are lists of those: put single "
                "samples into a list, and do not pad or stack sequences"
            )
        rows, without_label = [], 0
        for index, sample in enumerate(samples):
            row = _read_sample(index, sample)
            _check_range(index, row.ids, max_length, vocab_size)
            if not row.counts().any():
                without_label += 1
                continue
            _check_labels(index, row.labels, vocab_size)
            rows.append(row)
        if not rows:
            raise DataError(
                f"none of the {without_label} sequences of this batch has a label: a sequence "
                "needs two tokens, labels that are not all -100 and weights that are not all 0; "
                "check the data or its masks"
            )
        weights = () if all(r.weights is None for r in rows) else tuple(r.counts() for r in rows)
        ids, labels = tuple(r.ids for r in rows), tuple(r.labels for r in rows)
        return cls(ids, labels, weights, without_label)

    def select(self, sequences: Iterable[int]) -> StepBatch:
        """The part of the batch that one replica trains on."""
        chosen = list(sequences)
        parts = (self.ids, self.labels, self.weights)
        ids, labels, weights = (tuple(part[i] for i in chosen if part) for part in parts)
        return StepBatch(ids, labels, weights)

    @property
    def num_labels(self) -> int:
        """Tokens that are predicted."""
        return sum(int(np.count_nonzero(row != IGNORE_INDEX)) for row in self.labels)

    @property
    def label_weight(self) -> float:
        """What the summed loss is divided by: the labels' weights, or their number."""
        return float(sum(row.sum() for row in self.weights)) if self.weights else self.num_labels

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(i) for i in self.ids)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def chunk_ids(self, chunk: Chunk, sp_rank: int, sp_size: int) -> torch.Tensor:
        """Token ids `[T / sp]` of a chunk for one sequence-parallel rank."""
        return _local_part(self.ids, chunk, _PADDING_ID, sp_rank, sp_size)

    def chunk_labels(self, chunk: Chunk, sp_rank: int, sp_size: int) -> torch.Tensor:
        """Shifted labels `[T / sp]`, IGNORE_INDEX where there is none."""
        return _local_part(self.labels, chunk, IGNORE_INDEX, sp_rank, sp_size)

    def chunk_weights(self, chunk: Chunk, sp_rank: int, sp_size: int) -> torch.Tensor | None:
        """The labels' weights `[T / sp]` in float64, None where all are 1."""
        if not self.weights:
            return None
        return _local_part(self.weights, chunk, 0, sp_rank, sp_size)


def check_context_length(lengths: Sequence[int], data: DataSettings) -> None:
    """Raise DataError for a sequence beyond the `context_length` that the configuration names."""
    limit = data.context_length
    too_long = [i for i, length in enumerate(lengths) if length > limit]
    if too_long and "context_length" in data.model_fields_set:
        worst = max(too_long, key=lengths.__getitem__)
        raise DataError(
            f"sequence {worst} has {lengths[worst]} tokens, but infinipipe.data.context_length is "
            f"{limit} ({len(too_long)} of {len(lengths)} sequences are longer): raise it, or cut "
            "or drop them"
        )


@dataclass(frozen=True)
class _Row:
    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None

    def counts(self) -> np.ndarray:
        """Each label's weight, 0 where there is none."""
        has_label = (self.labels != IGNORE_INDEX).astype(np.float64)
        counts: np.ndarray = has_label if self.weights is None else has_label * self.weights
        return counts


def _read_sample(index: int, sample: Any) -> _Row:
    given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in given:
        raise DataError(
            f"sample {index} of the batch has keys {sorted(given)}; it needs 'input_ids'"
        )
    ids = _as_vector(index, "input_ids", given["input_ids"])
    labels, weights = ids, None
    if given.get("labels") is not None:
        labels = _as_vector(index, "labels", given["labels"])
    if given.get("loss_weights") is not None:
        weights = _as_weights(index, given["loss_weights"])
    for name, values in (("labels", labels), ("loss_weights", weights)):
        if values is not None and len(values) != len(ids):
            raise DataError(
                f"sample {index} has {len(ids)} input_ids but {len(values)} {name}; give one per "
                "token, not shifted"
            )
    return _Row(ids, _shift(labels, IGNORE_INDEX), None if weights is None else _shift(weights, 0))


def _as_weights(index: int, values: Any) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise DataError(
            f"sample {index}: loss_weights has shape {array.shape} and type {array.dtype}; it must "
            "be a vector of numbers"
        )
    if not np.isfinite(array).all() or (array < 0).any():
        raise DataError(f"sample {index}: loss_weights must be finite numbers of at least 0")
    return array.astype(np.float64)


def _as_vector(index: int, name: str, values: Any) -> np.ndarray:
    array = (
        values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    )
    if array.ndim == 0:
        raise DataError(
            f"sample {index} of the batch is {values!r}, not a sequence of tokens: a batch is a "
            "list of samples, and what is trained or evaluated on is an iterator or list of batches"
        )
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise DataError(
            f"sample {index}: {name} has shape {array.shape} and type {array.dtype}; it must be a "
            "vector of integers"
        )
    return array.astype(np.int64)


def _shift(values: np.ndarray, last: float) -> np.ndarray:
    # before any slicing: a slice's last token predicts the first token of the next slice
    shifted = np.full_like(values, last)
    shifted[:-1] = values[1:]
    return shifted


def _check_range(index: int, ids: np.ndarray, max_length: int, vocab_size: int) -> None:
    if len(ids) > max_length:
        raise DataError(
            f"sample {index} of the batch has {len(ids)} tokens, but the model has positions for "
            f"{max_length}: cut or drop it, or raise max_position_embeddings"
        )
    _check_vocabulary(index, "input_ids", ids, vocab_size)


def _check_labels(index: int, labels: np.ndarray, vocab_size: int) -> None:
    _check_vocabulary(index, "labels", labels[labels != IGNORE_INDEX], vocab_size)


def _check_vocabulary(index: int, name: str, values: np.ndarray, vocab_size: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= vocab_size):
        raise DataError(
            f"sample {index}: {name} range from {values.min()} to {values.max()}, but the "
            f"vocabulary has {vocab_size} entries: use the model's tokenizer or a larger vocab_size"
        )


def _local_part(
    arrays: Sequence[np.ndarray], chunk: Chunk, fill: int, sp_rank: int, sp_size: int
) -> torch.Tensor:
    parts = [arrays[s.sequence][s.start : s.end] for s in chunk.slices]
    parts.append(np.full(chunk.padding, fill, dtype=arrays[0].dtype))
    mine = rank_tokens(chunk.padded_tokens, sp_size, sp_rank)
    return torch.from_numpy(np.concatenate(parts)[mine])
