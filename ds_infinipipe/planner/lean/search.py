"""The best merged stream of a batch: least simulated time among those that fit the memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.deadline import Deadline
from ds_infinipipe.planner.lean.candidates import LeanCandidate, list_candidates
from ds_infinipipe.planner.lean.makespan_lp import solve_makespan
from ds_infinipipe.planner.lean.stage_lp import solve_stages
from ds_infinipipe.planner.lean.stream import simulate_s
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.memory_arrays import MemoryArrays
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.types import Chunk

__all__ = ["LeanChoice", "search_lean"]

IntArray: TypeAlias = NDArray[np.int64]

_LOGGER = logging.getLogger(__name__)
_MOST_SOLVES = 4
_MOST_MEASURED = 24
_MAKESPAN_SIZE = 6000


@dataclass(frozen=True, eq=False)
class LeanChoice:
    """A candidate with counts [pp, chunks] that fits, and its makespan."""

    candidate: LeanCandidate
    chunks: tuple[Chunk, ...]
    counts: IntArray
    makespan_s: float
    note: str = ""


class _Measured:
    """A candidate with its memory, asked for when needed."""

    def __init__(self, candidate: LeanCandidate, memory: MemoryModel, limit_bytes: int) -> None:
        self.candidate = candidate
        self.limit_bytes = limit_bytes
        self.chunks = candidate.packed.chunks(memory.layout.sp)
        self.arrays = MemoryArrays(memory, self.chunks)

    def fits(self, counts: IntArray | None = None) -> bool:
        peaks = self.arrays.peaks(self.candidate.schedule, counts)
        return bool((peaks <= self.limit_bytes).all())

    @cached_property
    def all_layers(self) -> IntArray:
        return np.repeat(self.arrays.layers[:, None], self.candidate.packed.num_chunks, axis=1)

    def choice(self, counts: IntArray | None) -> LeanChoice | None:
        """None where the counts do not fit in the exact scan."""
        if counts is None or not self.fits(counts):
            return None
        makespan_s = self.candidate.bound_s
        if counts.any():
            makespan_s = simulate_s(self.candidate.schedule, self.candidate.costs, counts)
        return LeanChoice(self.candidate, self.chunks, counts, makespan_s)

    def solve_stages(self) -> LeanChoice | None:
        candidate = self.candidate
        recompute_s = candidate.costs.recompute_s
        counts = solve_stages(self.arrays, candidate.schedule, recompute_s, self.limit_bytes)
        return self.choice(counts)

    def solve_makespan(self) -> LeanChoice | None:
        candidate = self.candidate
        counts = solve_makespan(self.arrays, candidate.schedule, candidate.costs, self.limit_bytes)
        return self.choice(counts)

    def uniform(self) -> LeanChoice | None:
        """The smallest equal count that fits; all layers where only that does."""
        for layers in range(int(self.arrays.layers.max()) + 1):
            counts = np.minimum(layers, self.all_layers)
            if self.fits(counts):
                return self.choice(counts)
        return None


def search_lean(
    lengths: Sequence[int],
    cost: CostModel,
    memory: MemoryModel,
    limit_bytes: int,
    settings: PlannerSettings,
    deadline: Deadline,
) -> LeanChoice | None:
    """Best first by the time without recomputation, which no recomputation can beat.

    The search ends where that time is no better than a plan at hand, or at the first that fits as
    it is. None where no merged stream fits.
    """
    candidates = list_candidates(lengths, cost, memory, limit_bytes, settings, deadline)
    search = _Search(memory, limit_bytes, settings, deadline)
    best = search.best_first(candidates)
    if best is None:
        best = search.any_that_fits(candidates)
    return best


class _Search:
    """Counts what was tried."""

    def __init__(
        self,
        memory: MemoryModel,
        limit_bytes: int,
        settings: PlannerSettings,
        deadline: Deadline,
    ) -> None:
        self.memory = memory
        self.limit_bytes = limit_bytes
        self.settings = settings
        self.deadline = deadline

    def best_first(self, candidates: Sequence[LeanCandidate]) -> LeanChoice | None:
        best: LeanChoice | None = None
        num_solved = 0
        for candidate in candidates[:_MOST_MEASURED]:
            if best is not None and candidate.bound_s >= best.makespan_s:
                break
            if self.deadline.is_over:
                break
            measured = _Measured(candidate, self.memory, self.limit_bytes)
            if self.settings.recompute != "full" and measured.fits():
                return measured.choice(np.zeros_like(measured.all_layers))
            if self.settings.recompute == "none" or num_solved >= _MOST_SOLVES:
                continue
            choice = self.recomputed(measured)
            num_solved += 1
            if choice is not None and (best is None or choice.makespan_s < best.makespan_s):
                best = choice
        return best

    def recomputed(self, measured: _Measured) -> LeanChoice | None:
        if self.settings.recompute == "full":
            return measured.choice(measured.all_layers)
        if self.settings.solver == "greedy":
            return measured.uniform()
        choice = measured.solve_stages()
        size = measured.candidate.costs.forward_s.size
        wanted = self.settings.recompute_lp
        if choice is None or wanted == "stage" or (wanted == "auto" and size > _MAKESPAN_SIZE):
            return choice
        other = measured.solve_makespan()
        if other is None or other.makespan_s >= choice.makespan_s:
            return choice
        return other

    def any_that_fits(self, candidates: Sequence[LeanCandidate]) -> LeanChoice | None:
        """The least time among all candidates that fit somehow, with equal counts if need be."""
        best: LeanChoice | None = None
        for candidate in candidates:
            if best is not None and (candidate.bound_s >= best.makespan_s or self.deadline.is_over):
                break
            measured = _Measured(candidate, self.memory, self.limit_bytes)
            choice = self._fitting(measured)
            if choice is not None and (best is None or choice.makespan_s < best.makespan_s):
                best = choice
        return best

    def _fitting(self, measured: _Measured) -> LeanChoice | None:
        if self.settings.recompute == "none":
            return measured.choice(np.zeros_like(measured.all_layers))
        if self.settings.recompute == "full":
            return measured.choice(measured.all_layers)
        return measured.uniform()
