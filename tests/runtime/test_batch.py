"""Batches: labels shifted before slicing, local parts, and errors that name the sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_infinipipe.errors import DataError
from ds_infinipipe.planner.types import Chunk, Slice
from ds_infinipipe.runtime.batch import IGNORE_INDEX, StepBatch
from ds_infinipipe.runtime.feed import BatchFeed


def _batch(*lengths: int) -> StepBatch:
    samples = [np.arange(n) + 10 * i for i, n in enumerate(lengths)]
    return StepBatch.from_samples(samples, 100, 1000)


def test_labels_are_shifted_per_sequence_and_counted_once() -> None:
    batch = _batch(4, 3)
    assert batch.labels[0].tolist() == [1, 2, 3, IGNORE_INDEX]
    assert batch.labels[1].tolist() == [11, 12, IGNORE_INDEX]
    assert batch.num_labels == 5
    assert batch.num_tokens == 7


def test_a_slice_predicts_the_first_token_of_the_next_slice() -> None:
    batch = _batch(5)
    first = Chunk((Slice(0, 0, 2, False),))
    assert batch.chunk_labels(first, 0, 1).tolist() == [1, 2]


def test_each_rank_gets_its_share_of_a_padded_chunk() -> None:
    batch = _batch(2, 3)
    chunk = Chunk((Slice(1, 0, 3, True), Slice(0, 0, 2, True)), padding=1)
    assert batch.chunk_ids(chunk, 0, 2).tolist() == [10, 11, 12]
    assert batch.chunk_ids(chunk, 1, 2).tolist() == [0, 1, 0]
    assert batch.chunk_labels(chunk, 1, 2).tolist() == [1, IGNORE_INDEX, IGNORE_INDEX]


def test_sequences_without_a_label_are_left_out_and_counted() -> None:
    batch = StepBatch.from_samples([[1], [1, 2], []], 10, 10)
    assert batch.lengths == (2,)
    assert batch.num_without_label == 2


def test_masked_labels_do_not_count() -> None:
    sample = {"input_ids": [5, 6, 7], "labels": torch.tensor([-100, -100, 7])}
    batch = StepBatch.from_samples([sample], 10, 10)
    assert batch.num_labels == 1
    assert batch.labels[0].tolist() == [-100, 7, -100]


def test_loss_weights_are_shifted_with_the_labels_and_default_to_one() -> None:
    samples = [{"input_ids": [5, 6, 7], "loss_weights": [9.0, 0.5, 2.0]}, [1, 2]]
    batch = StepBatch.from_samples(samples, 10, 10)
    assert [w.tolist() for w in batch.weights] == [[0.5, 2.0, 0.0], [1.0, 0.0]]
    assert batch.label_weight == 3.5
    assert batch.num_labels == 3
    chunk = Chunk((Slice(0, 0, 3, True),), padding=1)
    weights = batch.chunk_weights(chunk, 1, 2)
    assert weights is not None and weights.tolist() == [0.0, 0.0]
    assert batch.select([1]).weights[0].tolist() == [1.0, 0.0]


def test_a_sequence_whose_weights_are_all_zero_has_no_label() -> None:
    samples = [{"input_ids": [1, 2], "loss_weights": [1, 0]}, [3, 4]]
    batch = StepBatch.from_samples(samples, 10, 10)
    assert batch.lengths == (2,) and batch.num_without_label == 1
    assert batch.ids[0].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([[1], [2]], "none of the 2 sequences"),
        ([[1, 2], [3] * 11], "sample 1 of the batch has 11 tokens"),
        ([[1, 10]], "input_ids range from 1 to 10"),
        ([[1, -1]], "range from -1"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 input_ids but 1 labels"),
        ([{"input_ids": [1, 2], "labels": [1, 12]}], "labels range from 12"),
        ([{"text": "x"}], "needs 'input_ids'"),
        ([{"input_ids": [1, 2], "loss_weights": [1.0]}], "2 input_ids but 1 loss_weights"),
        ([{"input_ids": [1, 2], "loss_weights": [1.0, -1.0]}], "at least 0"),
        ([{"input_ids": [1, 2], "loss_weights": [1.0, float("nan")]}], "finite"),
        ([{"input_ids": [1, 2], "loss_weights": ["a", "b"]}], "vector of numbers"),
        ([{"input_ids": [1, 2], "loss_weights": [1.0, 0.0]}], "weights that are not all 0"),
        ([[0.5, 1.0]], "vector of integers"),
        ([[[1, 2], [3, 4]]], "vector of integers"),
    ],
)
def test_bad_samples_are_named(samples: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        StepBatch.from_samples(samples, 10, 10)


def test_the_feed_looks_one_batch_ahead_and_keeps_errors_for_their_step() -> None:
    def parse(samples: list[list[int]]) -> StepBatch:
        return StepBatch.from_samples(samples, 10, 10)

    feed = BatchFeed([[[1, 2]], [[3, 4, 5]], [[99, 1]]], parse)
    assert feed.next().lengths == (2,)
    ahead = feed.peek()
    assert ahead is not None and ahead.lengths == (3,)
    assert feed.peek() is ahead
    assert feed.next() is ahead
    assert feed.peek() is None
    with pytest.raises(DataError):
        feed.next()
    with pytest.raises(StopIteration):
        feed.next()
