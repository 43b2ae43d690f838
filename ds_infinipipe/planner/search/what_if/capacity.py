"""What would fit: the longest sequence at a memory limit, and the limit that a batch needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.deadline import Deadline
from ds_infinipipe.planner.search.paper.chunkings import Chunking, iterate_chunkings

__all__ = [
    "Capacity",
    "Misfit",
    "Question",
    "closest_misfit",
    "largest_context",
    "largest_fitting",
    "sufficient_limit",
]

_LONGEST = 2**28
_BUDGET_S = 0.5  # each for the context and for the limit
_MOST_LIMITS = 16


@dataclass(frozen=True)
class Misfit:
    """The block of chunks that needs most bytes in a pipeline of its own, and where."""

    chunking: Chunking
    block: tuple[int, ...]
    stage: int
    peak_bytes: int


@dataclass(frozen=True)
class Question:
    """All that feasibility depends on, the lengths apart."""

    setup: Setup
    settings: PlannerSettings

    @property
    def unit(self) -> int:
        """Slices end at multiples of it, so contexts are counted in it."""
        return self.setup.unit

    @property
    def all_ks(self) -> tuple[int, ...]:
        return tuple(range(1, self.settings.slice_limit(self.setup.layout.pp) + 1))

    @property
    def coarse_ks(self) -> tuple[int, ...]:
        """1, 2, 4 and so on, and the largest K: what one of them does is enough to know."""
        most = self.all_ks[-1]
        return (*(2**n for n in range(most.bit_length()) if 2**n < most), most)

    @cached_property
    def cost(self) -> CostModel:
        return CostModel(self.setup)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.setup)

    def within(self, limit_bytes: int) -> Question:
        """The same under another limit."""
        return replace(self, setup=replace(self.setup, limit_bytes=limit_bytes))

    def chunkings(self, lengths: Sequence[int], ks: Sequence[int]) -> Iterator[Chunking]:
        return iterate_chunkings(lengths, self.cost, self.memory, self.settings, ks)

    def fits_alone(self, length: int, ks: Sequence[int]) -> bool:
        """Whether one sequence of that length, cut by one of these K, can be planned."""
        for chunking in self.chunkings((length,), ks):
            (block,) = chunking.blocks()
            if chunking.fits(block):
                return True
            # lean mode falls back to greedy recomputation, which `fits` is
            if self.settings.mode == "paper" and chunking.solve(block) is not None:
                return True
        return False


@dataclass(frozen=True)
class Capacity:
    """`value` fits; whether the next larger one does not is known only where `is_exact`."""

    value: int
    is_exact: bool


def largest_context(question: Question, near: int) -> Capacity:
    """Longest sequence, in whole units, that can be planned alone within the limit; 0 if none.

    Bisection, which takes for granted that a shorter sequence fits wherever a longer one does: by
    few numbers of slices first, then whether others fit more. Lean mode's own meshes may fit a
    little more, which takes too long to find out. `near` is where to look first.
    """
    unit, deadline = question.unit, Deadline(_BUDGET_S)

    def fits(ks: Sequence[int]) -> Callable[[int], bool]:
        return lambda count: question.fits_alone(count * unit, ks)

    most = _LONGEST // unit
    found = largest_fitting(fits(question.coarse_ks), max(1, near // unit), most, deadline)
    if found.is_exact:
        next_count = found.value + 1
        found = largest_fitting(
            fits(question.all_ks), next_count, most, deadline, known=found.value
        )
    is_exact = found.is_exact and question.settings.mode != "lean"
    return Capacity(found.value * unit, is_exact)


def largest_fitting(
    fits: Callable[[int], bool], near: int, most: int, deadline: Deadline, known: int = 0
) -> Capacity:
    """Largest n in 1 to `most` with fits(n), 0 if none; `fits` must be true up to some n only.

    Looks at `near` and its doubles and halves until n is enclosed, then halves the interval.
    `known` fits without asking.
    """
    low, high = known, most + 1
    probe = min(near, most)
    while high - low > 1:
        if deadline.is_over:
            return Capacity(low, False)
        if fits(probe):
            low = probe
        else:
            high = probe
        if high > most:
            probe = min(2 * low, most)
        elif low == 0:
            probe = max(1, high // 2)
        else:
            probe = (low + high) // 2
    return Capacity(low, True)


def sufficient_limit(question: Question, lengths: Sequence[int], misfit: Misfit) -> int | None:
    """A limit in bytes within which the batch can be planned; None if none was found in time.

    A limit also decides how many tokens are packed, so what one packing needs is tried as the next
    limit until it is enough. `misfit` is what does not fit now.
    """
    deadline = Deadline(_BUDGET_S)
    needed = misfit
    for _ in range(_MOST_LIMITS):
        limit_bytes = needed.peak_bytes
        within = question.within(limit_bytes)
        needed = closest_misfit(within.chunkings(lengths, within.coarse_ks))
        if needed.peak_bytes <= limit_bytes:
            return limit_bytes
        if deadline.is_over:
            break
    return None


def closest_misfit(chunkings: Iterable[Chunking]) -> Misfit:
    """What needs most bytes in the chunking where that is least, all allowed layers recomputed."""
    return min((_worst(chunking) for chunking in chunkings), key=lambda m: m.peak_bytes)


def _worst(chunking: Chunking) -> Misfit:
    layout = chunking.memory.layout
    layers = 0 if chunking.settings.recompute == "none" else max(layout.stage_layers)
    worst = Misfit(chunking, (), 0, 0)
    for block in chunking.blocks():
        counts = np.minimum(layers, np.array(layout.stage_layers))[:, None]
        peaks = chunking.pipeline(block).peaks(np.broadcast_to(counts, (layout.pp, len(block))))
        if peaks.max() > worst.peak_bytes:
            worst = Misfit(chunking, block, int(peaks.argmax()), int(peaks.max()))
    return worst
