"""Batches: labels shifted before slicing, local parts, and errors that name the sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_infinipipe.config.section import DataSettings
from ds_infinipipe.errors import DataError, InfiniPipeError
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.runtime.stage.batch import IGNORE_INDEX, StepBatch, check_context_length
from ds_infinipipe.runtime.stage.feed import BatchFeed, Feeds


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
    with pytest.raises(StopIteration, match="ended after 3 batches"):
        feed.next()


def test_a_mapping_is_no_batch_and_a_number_no_sample() -> None:
    with pytest.raises(DataError, match="must be a list of samples"):
        StepBatch.from_samples({"input_ids": [[1, 2]]}, 10, 10)
    with pytest.raises(DataError, match="a batch is a list of samples"):
        StepBatch.from_samples([1, 2, 3], 10, 10)


def test_a_context_length_that_was_asked_for_holds_for_all_data() -> None:
    check_context_length([3, 5000], DataSettings())
    check_context_length([3, 100], DataSettings(context_length=100))
    with pytest.raises(DataError, match=r"sequence 1 has 101 tokens.*is 100 \(1 of 2"):
        check_context_length([3, 101], DataSettings(context_length=100))


def test_training_data_goes_on_behind_batches_of_the_users_own() -> None:
    feeds: Feeds[int] = Feeds(int)
    with pytest.raises(InfiniPipeError, match="no data"):
        feeds.of(None)
    own, other = iter([7, 8, 9]), [20]
    assert feeds.of(own).next() == 7
    assert feeds.of(None).next() == 8  # nothing else was ever given
    feeds.set_training(iter([1, 2, 3]))
    assert [feeds.of(None).next(), feeds.of(own).next(), feeds.of(None).next()] == [1, 9, 2]
    assert feeds.of(other).next() == 20
    assert (feeds.of(None).peek(), feeds.num_ahead) == (3, 1)
    assert feeds.of(other).peek() is None
    assert feeds.num_ahead == 1
    feeds.forget()
    assert feeds.num_ahead == 0
