"""What would fit: the longest sequence at a memory limit, and the limit that a batch needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ds_infinipipe.planner.candidates import Chunking
from ds_infinipipe.planner.chunkings import iterate_chunkings
from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.settings import PlannerSettings

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
_BUDGET_S = 0.4  # each for the context and for the limit
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
    """All that feasibility depends on, the lengths and the limit apart."""

    cost: CostModel
    memory: MemoryModel
    settings: PlannerSettings

    @property
    def unit(self) -> int:
        """Slices end at multiples of it, so contexts are counted in it."""
        return math.lcm(self.memory.layout.sp, self.settings.alignment)

    def chunkings(self, lengths: Sequence[int], limit_bytes: int) -> tuple[Chunking, ...]:
        found = iterate_chunkings(lengths, self.cost, self.memory, limit_bytes, self.settings)
        return tuple(found)

    def fits_alone(self, length: int, limit_bytes: int) -> bool:
        """Whether one sequence of that length is a batch that can be planned."""
        return any(
            all(c.fits(block) or c.solve(block) is not None for block in c.blocks())
            for c in reversed(self.chunkings((length,), limit_bytes))
        )


@dataclass(frozen=True)
class Capacity:
    """`value` fits; whether the next larger one does not is known only where `is_exact`."""

    value: int
    is_exact: bool


def largest_context(question: Question, limit_bytes: int, near: int) -> Capacity:
    """Longest sequence, in whole units, that can be planned alone within the limit; 0 if none.

    Bisection, which takes for granted that a shorter sequence fits wherever a longer one does.
    `near` is where to look first, a length in question.
    """
    unit = question.unit
    found = largest_fitting(
        lambda count: question.fits_alone(count * unit, limit_bytes),
        max(1, near // unit),
        _LONGEST // unit,
    )
    return Capacity(found.value * unit, found.is_exact)


def largest_fitting(fits: Callable[[int], bool], near: int, most: int) -> Capacity:
    """Largest n in 1 to `most` with fits(n), 0 if none; `fits` must be true up to some n only.

    Looks at `near` and its doubles and halves until n is enclosed, then halves the interval.
    """
    deadline_s = time.perf_counter() + _BUDGET_S
    low, high = 0, most + 1
    probe = min(near, most)
    while high - low > 1:
        if time.perf_counter() > deadline_s:
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
    deadline_s = time.perf_counter() + _BUDGET_S
    needed = misfit
    for _ in range(_MOST_LIMITS):
        limit_bytes = needed.peak_bytes
        needed = closest_misfit(question.chunkings(lengths, limit_bytes))
        if needed.peak_bytes <= limit_bytes:
            return limit_bytes
        if time.perf_counter() > deadline_s:
            break
    return None


def closest_misfit(chunkings: Sequence[Chunking]) -> Misfit:
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
