"""Ways to chunk and order one batch, each with the time it takes without recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.predict.ledger import Ledger
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.replica_sum import GradientSums
from ds_infinipipe.planner.predict.schedule import ScheduleArrays
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel
from ds_infinipipe.planner.search.deadline import Deadline
from ds_infinipipe.planner.search.lean.packing import (
    PackedBatch,
    SortedBatch,
    StreamShape,
    cut_batch,
    pack_batch,
    stage_rates,
)
from ds_infinipipe.planner.search.lean.stream import build_stream, simulate_s, stream_costs

__all__ = ["CandidateSpace", "LeanCandidate", "LeanChoice", "iterate_frugal", "list_candidates"]

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
_RAMP_SHORT = StreamShape(lead=(0.34, 0.56), trail=(0.9, 0.7, 0.5, 0.4), growth=1.0)
_RAMP_LONG = StreamShape(
    lead=(0.2, 0.33, 0.53, 0.81), trail=(0.95, 0.85, 0.75, 0.6, 0.4, 0.3), growth=1.0
)
_SHAPES = (StreamShape(), _RAMP_SHORT, _RAMP_LONG)
_TOKEN_FACTORS = (1.0, 1.4, math.inf)
_FEW_SLICES = (1, 2, 4)
_EVERY_K = 32
_MOST_NEIGHBOURS, _LEAST_NEIGHBOURS = 250, 20
_NEIGHBOUR_SIZE = 150_000  # chunks times stages of all neighbours of a start together
_TYPICAL_SHARE = 0.98  # the longest sequences say nothing about a pack of short ones


@dataclass(frozen=True, eq=False)
class LeanChoice:
    """A candidate with counts [pp, chunks] that fits, its time, and its memory."""

    candidate: LeanCandidate
    counts: IntArray
    takes_s: float
    ledger: Ledger
    status: str = "feasible"
    note: str = ""


@dataclass(frozen=True, eq=False)
class LeanCandidate:
    """A packed batch in its stream; `bound_s` is its time with nothing recomputed.

    `k` is the slices of the longest sequence that were asked for. With `sums`, those of the
    replicas' gradients, a time is that of the step and not only of the stream.
    """

    k: int
    target_s: float
    max_tokens: int
    shape: StreamShape
    packed: PackedBatch
    schedule: ScheduleArrays
    costs: ChunkCosts
    bound_s: float
    sums: GradientSums | None = None

    def takes_s(self, counts: IntArray) -> float:
        """Time with stage p recomputing counts[p, k] layers of chunk k."""
        if not counts.any():
            return self.bound_s
        return simulate_s(self.schedule, self.costs, counts, self.sums)


@dataclass(frozen=True)
class CandidateSpace:
    """What all candidates of a batch share."""

    batch: SortedBatch
    cost: CostModel
    memory: MemoryModel
    settings: PlannerSettings
    rates: FloatArray
    typical_token_s: float
    sums: GradientSums | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        cost: CostModel,
        memory: MemoryModel,
        settings: PlannerSettings,
        sums: GradientSums | None = None,
    ) -> CandidateSpace:
        batch = SortedBatch.of(lengths, cost)
        rates, token_s = stage_rates(cost), _typical_token_s(batch, cost)
        return cls(batch, cost, memory, settings, rates, token_s, sums)

    @property
    def most_slices(self) -> int:
        """The largest K; a slice has at least one unit of the longest sequence."""
        finest = -(-int(self.batch.lengths[0]) // self.memory.setup.unit)
        return min(self.settings.slice_limit(self.cost.layout.pp), finest)

    @property
    def sp(self) -> int:
        return self.cost.layout.sp

    def targets(self) -> list[tuple[int, float]]:
        """(K, target time) of chunks, the likely ones first.

        The longest sequence's K-th part, or several times all of it. n chunks have n fixed costs
        and leave about pp - 1 of them as bubbles: the sum is least at sqrt(cost * work / (pp - 1)).
        """
        longest_s, total_s = float(self.batch.whole_s[0]), float(self.batch.work_s.sum())
        steps = max(0, math.floor(2 * math.log2(max(1.0, total_s / longest_s))))
        found = [(1, longest_s * 2 ** (step / 2)) for step in range(steps, 0, -1)]
        found += [(k, longest_s / k) for k in _slice_counts(self.most_slices)]
        c, layout = self.cost.coefficients, self.cost.layout
        fixed_s = self.cost.mean_layers * (c.overhead_forward_s + c.overhead_backward_s)
        likely_s = math.sqrt(max(fixed_s, 1e-9) * total_s / max(1, layout.pp - 1))
        return sorted(found, key=lambda target: abs(math.log(target[1] / likely_s)))

    def token_limits(self, k: int, target_s: float) -> list[int]:
        """T_m in multiples of sp: what memory holds, and what makes packs of equal time."""
        largest = int(self.batch.lengths.sum())
        given = self.settings.token_limit
        if given != "auto":
            return [max(self.sp, given // self.sp * self.sp)]
        capacity = self.memory.token_capacity(k, self.memory.setup.limit_bytes)
        limits = []
        for factor in _TOKEN_FACTORS:
            tokens = int(min(capacity, factor * target_s / self.typical_token_s, largest + self.sp))
            limits.append(max(self.sp, tokens // self.sp * self.sp))
        return sorted(set(limits))

    def candidate(
        self, k: int, target_s: float, max_tokens: int, shape: StreamShape, most: int
    ) -> LeanCandidate:
        unit = self.memory.setup.unit
        mesh = cut_batch(self.batch, self.cost, target_s, max_tokens, most, unit)
        packed = pack_batch(self.batch, mesh, self.rates, target_s, max_tokens, shape)
        schedule = build_stream(packed, self.cost.layout.pp, shape.growth, shape.extra)
        costs = stream_costs(packed, self.cost)
        bound_s = simulate_s(schedule, costs, sums=self.sums)
        return LeanCandidate(
            k, target_s, max_tokens, shape, packed, schedule, costs, bound_s, self.sums
        )


def list_candidates(space: CandidateSpace, deadline: Deadline) -> list[LeanCandidate]:
    """All that were tried until the deadline, least bound first; at least one."""
    found: list[LeanCandidate] = []
    for k, target_s in space.targets():
        for max_tokens in space.token_limits(k, target_s):
            for shape in _SHAPES:
                if found and deadline.is_over:
                    break
                found.append(space.candidate(k, target_s, max_tokens, shape, space.most_slices))
    found.sort(key=lambda c: c.bound_s)
    starts = [c for c in found if c.shape.lead]
    starts = starts[:1] + [c for c in starts if c.k != starts[0].k][:1]
    for start in starts:
        found += _refine(space, start, deadline)
    return sorted(found, key=lambda c: c.bound_s)


def _refine(space: CandidateSpace, best: LeanCandidate, deadline: Deadline) -> list[LeanCandidate]:
    """Better and better neighbours of `best`: other ramps and chunk times, tried at random.

    Fewer for large batches, so that it takes about as long as the search before it; the seed is
    that of the settings.
    """
    rng = np.random.default_rng(space.settings.seed)
    size = best.packed.num_chunks * space.cost.layout.pp
    better: list[LeanCandidate] = []
    for _ in range(min(_MOST_NEIGHBOURS, max(_LEAST_NEIGHBOURS, _NEIGHBOUR_SIZE // size))):
        if deadline.is_over:
            break
        target_s = best.target_s
        if rng.random() < 0.5:
            target_s *= float(np.exp(rng.normal(0.0, 0.08)))
        other = space.candidate(
            best.k, target_s, best.max_tokens, _neighbour(best.shape, rng), space.most_slices
        )
        if other.bound_s < best.bound_s:
            best = other
            better.append(other)
    return better


def _neighbour(shape: StreamShape, rng: np.random.Generator) -> StreamShape:
    """Every share of the ramps a little different, or one ramp longer or shorter by a chunk."""
    lead, trail = (
        tuple(min(1.0, max(0.1, share * math.exp(rng.normal(0.0, 0.15)))) for share in ramp)
        for ramp in (shape.lead, shape.trail)
    )
    change = rng.random()
    if change < 0.1:
        lead = (*lead, rng.uniform(0.2, 1.0))
    elif change < 0.2:
        lead = lead[1:]
    elif change < 0.3:
        trail = (*trail, rng.uniform(0.2, 1.0))
    elif change < 0.4:
        trail = trail[:-1]
    return replace(shape, lead=lead, trail=trail, extra=int(rng.random() < 0.15))


def iterate_frugal(space: CandidateSpace) -> Iterator[LeanCandidate]:
    """What needs little memory: short chunks, long sequences in few slices; shortest chunks first.

    K/V and their gradients of a cut sequence can outweigh what recomputing it whole keeps.
    """
    limits = {min(most, space.most_slices) for most in (*_FEW_SLICES, space.most_slices)}
    shapes = [StreamShape()]
    if space.cost.layout.pp > 1:
        shapes.append(StreamShape(spread=space.cost.layout.pp))
    for k, target_s in sorted(space.targets(), key=lambda target: target[1]):
        max_tokens = min(space.token_limits(k, target_s))
        for most in sorted(limits, reverse=True):
            for shape in shapes:
                yield space.candidate(k, target_s, max_tokens, shape, most)


def _slice_counts(most: int) -> list[int]:
    """All K up to 32, then steps of an eighth, and the largest."""
    counts = list(range(1, min(most, _EVERY_K) + 1))
    while counts[-1] < most:
        counts.append(min(most, counts[-1] + max(1, counts[-1] // 8)))
    return counts


def _typical_token_s(batch: SortedBatch, cost: CostModel) -> float:
    """Time of a token in a pack of sequences of mean length, the longest ones left out."""
    mean = float(batch.lengths[int(batch.lengths.size * (1 - _TYPICAL_SHARE)) :].mean())
    c = cost.coefficients
    quadratic_s = (c.attention_forward_s + c.attention_backward_s) * cost.area.per_token(mean)
    return cost.mean_layers * (3 * c.linear_s + 2 * c.all2all_s + quadratic_s)
