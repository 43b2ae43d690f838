"""One step's sequences as arrays, and the tokens of a chunk as tensors of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_infinipipe.errors import DataError
from ds_infinipipe.model.context import rank_tokens
from ds_infinipipe.planner.types import Chunk

__all__ = ["IGNORE_INDEX", "StepBatch"]

IGNORE_INDEX = -100
_PADDING_ID = 0


@dataclass(frozen=True)
class StepBatch:
    """The sequences of one optimizer step, the same on every rank.

    `labels` are already shifted: `labels[i][t]` is what position t of sequence i must predict, and
    IGNORE_INDEX at its last token. Sequences without any label are left out and counted.
    """

    ids: tuple[np.ndarray, ...]
    labels: tuple[np.ndarray, ...]
    num_labels: int
    num_without_label: int

    @classmethod
    def from_samples(cls, samples: Iterable[Any], max_length: int, vocab_size: int) -> StepBatch:
        """Read samples: mappings with `input_ids` and optionally unshifted `labels`, or ids alone.

        Raises DataError for a malformed or over-long sample, an id outside the vocabulary, and a
        batch in which nothing can be learned.
        """
        ids, labels, without_label, total = [], [], 0, 0
        for index, sample in enumerate(samples):
            sample_ids, sample_labels = _read_sample(index, sample)
            _check_range(index, sample_ids, max_length, vocab_size)
            shifted = _shift(sample_labels)
            count = int(np.count_nonzero(shifted != IGNORE_INDEX))
            if count == 0:
                without_label += 1
                continue
            _check_labels(index, shifted, vocab_size)
            ids.append(sample_ids)
            labels.append(shifted)
            total += count
        if not ids:
            raise DataError(
                f"none of the {without_label} sequences of this batch has a label: a sequence "
                "needs two tokens, and labels that are not all -100; check the data or its masks"
            )
        return cls(tuple(ids), tuple(labels), total, without_label)

    def select(self, sequences: Iterable[int]) -> StepBatch:
        """The part of the batch that one replica trains on."""
        chosen = list(sequences)
        labels = tuple(self.labels[i] for i in chosen)
        count = sum(int(np.count_nonzero(row != IGNORE_INDEX)) for row in labels)
        return StepBatch(tuple(self.ids[i] for i in chosen), labels, count, 0)

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


def _read_sample(index: int, sample: Any) -> tuple[np.ndarray, np.ndarray]:
    given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in given:
        raise DataError(
            f"sample {index} of the batch has keys {sorted(given)}; it needs 'input_ids'"
        )
    ids = _as_vector(index, "input_ids", given["input_ids"])
    if given.get("labels") is None:
        return ids, ids
    labels = _as_vector(index, "labels", given["labels"])
    if len(labels) != len(ids):
        raise DataError(
            f"sample {index} has {len(ids)} input_ids but {len(labels)} labels; give one label per "
            "token, not shifted, -100 where there is none"
        )
    return ids, labels


def _as_vector(index: int, name: str, values: Any) -> np.ndarray:
    array = (
        values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    )
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise DataError(
            f"sample {index}: {name} has shape {array.shape} and type {array.dtype}; it must be a "
            "vector of integers"
        )
    return array.astype(np.int64)


def _shift(labels: np.ndarray) -> np.ndarray:
    # before any slicing: a slice's last token predicts the first token of the next slice
    shifted = np.full_like(labels, IGNORE_INDEX)
    shifted[:-1] = labels[1:]
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
    parts.append(np.full(chunk.padding, fill, dtype=np.int64))
    mine = rank_tokens(chunk.padded_tokens, sp_size, sp_rank)
    return torch.from_numpy(np.concatenate(parts)[mine])
