"""Evaluation: the forward part of a plan, losses by sequence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist

from ds_infinipipe.errors import DataEndError, DataError
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.runtime.ranks.faults import check_all_took_part
from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.stage.batch import IGNORE_INDEX, StepBatch

__all__ = ["Bucket", "EvaluationReport", "batches_of", "forward_only"]

_KEPT = (Op.FORWARD, Op.SEND_ACTIVATION, Op.RECV_ACTIVATION)


@dataclass(frozen=True)
class Bucket:
    """Sequences of at most `max_length` tokens, and more than the bucket before."""

    max_length: int
    sequences: int
    labels: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


@dataclass(frozen=True)
class EvaluationReport:
    """Losses by sequence: sums over each sequence's labels, times their weights if they have any.

    `label_weights` are the sums of a sequence's weights, the number of its labels without.
    """

    lengths: tuple[int, ...]
    labels: tuple[int, ...]
    label_weights: tuple[float, ...]
    sequence_losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Mean over all labels, by weight."""
        return math.fsum(self.sequence_losses) / math.fsum(self.label_weights)

    @property
    def perplexity(self) -> float:
        return Bucket(0, 0, 0, self.loss).perplexity

    @classmethod
    def gather(
        cls, rank: Rank, losses: torch.Tensor, whole: StepBatch, members: Sequence[int]
    ) -> EvaluationReport:
        """Every rank's `losses`, summed by sequence; a collective over all ranks.

        They are of the sequences `members` of `whole`, of which this rank's replica had those.
        """
        totals = torch.zeros(len(whole.ids) + 1, dtype=torch.float64)
        totals[-1] = 1.0
        totals.index_add_(0, torch.tensor(list(members), dtype=torch.int64), losses)
        totals = totals.to(rank.device)
        dist.all_reduce(totals)
        sums = totals.tolist()
        check_all_took_part(sums.pop(), "evaluation")
        labels = tuple(int(np.count_nonzero(row != IGNORE_INDEX)) for row in whole.labels)
        weights = tuple(float(row.sum()) for row in whole.weights) or tuple(map(float, labels))
        return cls(whole.lengths, labels, weights, tuple(sums))

    @classmethod
    def joined(cls, reports: Sequence[EvaluationReport]) -> EvaluationReport:
        """One report on the sequences of several."""

        def join(name: str) -> tuple[Any, ...]:
            return tuple(itertools.chain.from_iterable(getattr(r, name) for r in reports))

        return cls(join("lengths"), join("labels"), join("label_weights"), join("sequence_losses"))

    def buckets(self, limits: Sequence[int] = (1024, 4096, 16384, 65536)) -> tuple[Bucket, ...]:
        """Loss by document length; the last bucket holds what is longer than every limit."""
        found = []
        edges = [0, *sorted(limits), max(2**62, *limits)]
        for low, high in itertools.pairwise(edges):
            inside = [i for i, n in enumerate(self.lengths) if low < n <= high]
            weight = math.fsum(self.label_weights[i] for i in inside)
            if weight:
                total = math.fsum(self.sequence_losses[i] for i in inside)
                count = sum(self.labels[i] for i in inside)
                found.append(Bucket(high, len(inside), count, total / weight))
        return tuple(found)


def batches_of(given: Iterable[Any]) -> Iterator[Any]:
    """The batches that an evaluation takes: an iterator's next one, or all of a list or loader.

    Raises DataEndError where there is none, DataError for an iterable that may never end.
    """
    if isinstance(given, Iterator):
        batches: Iterator[Any] = itertools.islice(given, 1)
    elif isinstance(given, Sized):
        batches = iter(given)
    else:
        raise DataError(
            f"eval_batch got a {type(given).__name__} that does not say how many batches it has: "
            "give it iter(...) of it for one batch, or a list for all of them"
        )
    # no generator: what a StopIteration leaves becomes a RuntimeError
    try:
        first = next(batches)
    except StopIteration:
        raise DataEndError(
            "eval_batch got no batch: the list is empty or the iterator has ended"
        ) from None
    return itertools.chain([first], batches)


def forward_only(plan: Plan) -> Plan:
    """The same chunks in the same order, without backward and step."""
    streams = tuple(tuple(i for i in stream if i.op in _KEPT) for stream in plan.streams)
    return replace(plan, streams=streams)
