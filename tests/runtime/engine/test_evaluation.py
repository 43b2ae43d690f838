"""Evaluation equals the reference and leaves training alone, in any order."""

from __future__ import annotations

import logging
import math
import warnings

import pytest
import torch
from ranks import run_strict

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import FLOAT64_LIMIT, Case, Reference
from ds_infinipipe.data.sampler import SequenceSampler
from ds_infinipipe.errors import DataEndError, DataError
from ds_infinipipe.runtime.engine.evaluate import EvaluationReport, batches_of

pytestmark = pytest.mark.ranks


def _samples(batch):  # type: ignore[no-untyped-def]
    """The batch as a user would give it: labels not shifted."""
    return [
        {"input_ids": ids, "labels": [-100, *labels[:-1].tolist()]}
        for ids, labels in zip(batch.ids, batch.labels, strict=True)
    ]


def _interleave(rank: int, case: Case, order: str) -> list[tuple[str, float, float, list[float]]]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    engine = exactness.build_engine(case)
    found = []
    with exactness.exact_norms(engine, case):
        reference = Reference(engine, case)
        for step, kind in enumerate(order):
            batch = exactness.random_batch(case, step)
            reference.copy_weights(engine)
            wanted, _ = reference.run(batch)
            if kind == "E":
                loss = float(engine.eval_batch([_samples(batch)]))
                assert engine.evaluation is not None
                by_sequence = list(engine.evaluation.sequence_losses)
            else:
                loss, by_sequence = float(engine.train_batch([_samples(batch)])), []
            found.append((kind, loss, wanted, by_sequence))
    engine.close()
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 2, 2, zero_stage=0, float64=True, num_layers=2),
        Case("qwen2", 2, 1, 2, zero_stage=0, float64=True, tied=True, num_layers=2),
    ],
    ids=["2x2", "two replicas"],
)
def test_evaluation_between_training_steps_is_exact(case: Case) -> None:
    for found in run_strict(_interleave, 4, case, "ETTEET", timeout=120.0):
        for _kind, loss, wanted, _ in found:
            assert loss == pytest.approx(wanted, abs=FLOAT64_LIMIT)


def test_sequence_losses_add_up_and_are_the_same_on_all_ranks() -> None:
    case = Case("llama", 2, 2, zero_stage=3, num_layers=2)
    by_rank = run_strict(_interleave, 4, case, "E", timeout=120.0)
    losses = [found[0][3] for found in by_rank]
    assert all(row == losses[0] for row in losses)
    batch = exactness.random_batch(case, 0)
    assert sum(losses[0]) / batch.num_labels == pytest.approx(by_rank[0][0][1], abs=1e-6)
    assert len(losses[0]) == len(batch.ids)


def test_buckets_weigh_by_labels_and_leave_empty_ones_out() -> None:
    weights = (9.0, 4.0, 6.0, 2.0)
    report = EvaluationReport((10, 2000, 3000, 99999), (9, 4, 6, 2), weights, (18.0, 4.0, 3.0, 2.0))
    buckets = report.buckets((1024, 4096, 8192))
    assert [(b.max_length, b.sequences, b.labels, b.loss) for b in buckets] == [
        (1024, 1, 9, 2.0),
        (4096, 2, 10, 0.7),
        (2**62, 1, 2, 1.0),
    ]
    assert buckets[0].perplexity == pytest.approx(math.exp(2.0))
    assert torch.isfinite(torch.tensor(report.perplexity))


def _reports(rank: int, case: Case) -> list[tuple[float, int]]:
    engine = exactness.build_engine(case)
    batches = [_samples(exactness.random_batch(case, step)) for step in range(3)]
    iterator = iter(batches)
    found = []
    for given in (batches, iterator, iterator, [batches[2]]):
        loss = float(engine.eval_batch(given))
        assert engine.evaluation is not None
        found.append((loss, sum(engine.evaluation.labels)))
    engine.close()
    return found


def test_a_list_is_evaluated_whole_and_an_iterator_batch_by_batch() -> None:
    case = Case("llama", 1, 1, zero_stage=0, float64=True, num_layers=1)
    (whole, *parts) = run_strict(_reports, 1, case, timeout=120.0)[0]
    assert whole[1] == sum(labels for _, labels in parts)
    mean = sum(loss * labels for loss, labels in parts) / whole[1]
    assert whole[0] == pytest.approx(mean, abs=1e-12)
    assert len({loss for loss, _ in parts}) == 3


def test_evaluating_nothing_or_without_end_is_refused() -> None:
    with pytest.raises(DataEndError, match="no batch"):
        list(batches_of([]))
    with pytest.raises(StopIteration):
        list(batches_of(iter(())))
    with pytest.raises(DataError, match=r"iter\(\.\.\.\)"):
        list(batches_of(SequenceSampler(3, 2)))


def test_weighted_labels_weigh_in_buckets_too() -> None:
    report = EvaluationReport((10, 20), (9, 4), (4.5, 0.5), (9.0, 2.0))
    assert report.loss == pytest.approx(11.0 / 5.0)
    assert report.buckets((16,))[1].loss == pytest.approx(4.0)
