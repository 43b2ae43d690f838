"""The best merged stream of a batch: least simulated time among those that fit the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.predict.ledger import Ledger, StageRows
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.replica_sum import GradientSums
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.deadline import Deadline
from ds_infinipipe.planner.search.lean.candidates import (
    CandidateSpace,
    LeanCandidate,
    LeanChoice,
    iterate_frugal,
    list_candidates,
)
from ds_infinipipe.planner.search.lean.makespan_lp import solve_makespan
from ds_infinipipe.planner.search.lean.one_stage import iterate_whole
from ds_infinipipe.planner.search.lean.split import split_choice
from ds_infinipipe.planner.search.lean.stage_lp import round_point, solve_stages

__all__ = ["search_lean"]

IntArray: TypeAlias = NDArray[np.int64]

_MOST_SOLVES = 3
_MOST_FIRST = 4
_MOST_MEASURED = 14
_MOST_FITTING = 8
_MOST_SPLIT = 5
_MAKESPAN_SIZE = 6000


class _Measured:
    """A candidate with its memory."""

    def __init__(self, candidate: LeanCandidate, memory: MemoryModel) -> None:
        self.candidate = candidate
        self.limit_bytes = memory.setup.limit_bytes
        packed, sp = candidate.packed, memory.layout.sp
        self.ledger = Ledger(memory, packed.outlines(sp), packed.longest_segments(sp))

    def fits(self, counts: IntArray | None = None) -> bool:
        peaks = self.ledger.peaks(self.candidate.schedule, counts)
        return bool((peaks <= self.limit_bytes).all())

    def equal_counts(self, layers: int) -> IntArray:
        counts = np.minimum(layers, self.ledger.layers)[:, None]
        return np.repeat(counts, self.candidate.packed.num_chunks, axis=1)

    @property
    def all_layers(self) -> int:
        return int(self.ledger.layers.max())

    def choice(self, counts: IntArray | None) -> LeanChoice | None:
        """None where the counts do not fit in the exact scan."""
        if counts is None or not self.fits(counts):
            return None
        return LeanChoice(self.candidate, counts, self.candidate.takes_s(counts), self.ledger)

    @cached_property
    def rows(self) -> tuple[StageRows, ...] | None:
        return self.ledger.rows(self.candidate.schedule, self.limit_bytes)

    def round_up(self) -> LeanChoice | None:
        """Without an LP: rows repaired one after the other."""
        if self.rows is None:
            return None
        recompute_s = self.candidate.costs.recompute_s
        nothing = np.zeros(self.ledger.shape)
        return self.choice(round_point(self.ledger, self.rows, nothing, recompute_s))

    def solve_stages(self) -> LeanChoice | None:
        if self.rows is None:
            return None
        recompute_s = self.candidate.costs.recompute_s
        return self.choice(solve_stages(self.ledger, self.rows, recompute_s))

    def solve_makespan(self) -> LeanChoice | None:
        if self.rows is None:
            return None
        candidate = self.candidate
        counts = solve_makespan(self.ledger, self.rows, candidate.schedule, candidate.costs)
        return self.choice(counts)

    def uniform(self) -> LeanChoice | None:
        """The smallest equal count that fits."""
        counts = (self.equal_counts(layers) for layers in range(self.all_layers + 1))
        return next((c for c in map(self.choice, counts) if c is not None), None)


def search_lean(
    lengths: Sequence[int],
    cost: CostModel,
    memory: MemoryModel,
    settings: PlannerSettings,
    deadline: Deadline,
    sums: GradientSums | None = None,
) -> LeanChoice | None:
    """Least simulated time among the candidates that fit; None where no merged stream does.

    The time without recomputation bounds a candidate from below. Those of least bound are measured
    first; where none of them fits as it is, the best of every K too. Recomputation is estimated by
    rounding, then solved for the most promising. Backwards of the best few are split where stages
    wait. One stage (pp = 1) keeps sequences whole; other candidates are looked at only where that
    has to recompute. With replicas, their `sums` of gradients count where no backward hides them.
    """
    space = CandidateSpace.of(lengths, cost, memory, settings, sums)
    search = _Search(memory, settings, deadline)
    best = search.whole_sequences(space) if cost.layout.pp == 1 else None
    if best is None or best.counts.any():
        best = search.best_first(list_candidates(space, deadline))
    status = "feasible"
    if best is None:
        best, status = search.first_that_fits(iterate_frugal(space)), "fallback"
    if best is None:
        return None
    if settings.split_backward == "auto" and cost.layout.pp > 1:
        best = search.split()
    late = f"deadline of {deadline.limit_s:.3g} s reached, the best plan so far is taken"
    return replace(best, status=status, note=late if deadline.is_over else "")


class _Search:
    """Measures and solves candidates, and keeps the best."""

    def __init__(self, memory: MemoryModel, settings: PlannerSettings, deadline: Deadline) -> None:
        self.memory = memory
        self.settings = settings
        self.deadline = deadline
        self.best: LeanChoice | None = None
        self._found: list[LeanChoice] = []

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best.takes_s

    def keep(self, choice: LeanChoice | None) -> LeanChoice | None:
        if choice is not None:
            self._found.append(choice)
            if choice.takes_s < self.best_s:
                self.best = choice
        return choice

    def split(self) -> LeanChoice:
        """The best after backwards of the few best are split, which can change their order."""
        self._found.sort(key=lambda choice: choice.takes_s)
        limit_bytes = self.memory.setup.limit_bytes
        few = self._found[:_MOST_SPLIT]
        split = (split_choice(choice, limit_bytes, self.deadline) for choice in few)
        return min(split, key=lambda choice: choice.takes_s)

    def whole_sequences(self, space: CandidateSpace) -> LeanChoice | None:
        for candidate, counts in iterate_whole(space):
            self.keep(_Measured(candidate, self.memory).choice(counts))
            if self.best is not None and self.deadline.is_over:
                break
        return self.best

    def best_first(self, candidates: Sequence[LeanCandidate]) -> LeanChoice | None:
        tight: list[tuple[float, int, _Measured]] = []
        for number, candidate in enumerate(_promising(candidates)):
            if candidate.bound_s >= self.best_s or (number > 0 and self.deadline.is_over):
                break
            measured = _Measured(candidate, self.memory)
            if self.settings.recompute == "full":
                self.keep(measured.choice(measured.equal_counts(measured.all_layers)))
            elif measured.fits():
                self.keep(measured.choice(measured.equal_counts(0)))
            elif self.settings.recompute == "adaptive":
                estimate = self.keep(self._estimate(measured))
                if estimate is not None:
                    tight.append((estimate.takes_s, len(tight), measured))
        if self.settings.solver != "greedy":
            self._solve(tight)
        return self.best

    def _estimate(self, measured: _Measured) -> LeanChoice | None:
        is_greedy = self.settings.solver == "greedy" or self.deadline.is_over
        return measured.uniform() if is_greedy else measured.round_up()

    def _solve(self, tight: Sequence[tuple[float, int, _Measured]]) -> None:
        chosen = [measured for _, _, measured in sorted(tight)[:_MOST_SOLVES]]
        for measured in chosen:
            if self._is_worth(measured):
                self.keep(measured.solve_stages())
        if self.settings.lean_solver == "stage":
            return
        size = 0
        for measured in chosen:
            size += measured.candidate.costs.forward_s.size
            if self.settings.lean_solver == "auto" and size > _MAKESPAN_SIZE:
                break
            if self._is_worth(measured):
                self.keep(measured.solve_makespan())

    def _is_worth(self, measured: _Measured) -> bool:
        return measured.candidate.bound_s < self.best_s and not self.deadline.is_over

    def first_that_fits(self, candidates: Iterable[LeanCandidate]) -> LeanChoice | None:
        """The best of the few of least bound that fit; after the deadline any that fits."""
        num_found = 0
        if not self.deadline.is_over:
            candidates = sorted(candidates, key=lambda candidate: candidate.bound_s)
        for candidate in candidates:
            is_late = self.deadline.is_over and self.best is not None
            if num_found == _MOST_FITTING or candidate.bound_s >= self.best_s or is_late:
                break
            measured = _Measured(candidate, self.memory)
            num_found += self.keep(self._anyhow(measured)) is not None
        return self.best

    def _anyhow(self, measured: _Measured) -> LeanChoice | None:
        if self.settings.recompute == "none":
            return measured.choice(measured.equal_counts(0))
        if self.settings.recompute == "full":
            return measured.choice(measured.equal_counts(measured.all_layers))
        if self.settings.solver == "greedy" or self.deadline.is_over:
            return measured.uniform()
        return measured.solve_stages() or measured.uniform()


def _promising(candidates: Sequence[LeanCandidate]) -> list[LeanCandidate]:
    """The first few, and the first of every K and start of the stream; least bound first."""
    chosen: list[LeanCandidate] = []
    seen: set[tuple[int, bool]] = set()
    for candidate in candidates:
        kind = candidate.k, candidate.shape.growth > 0
        if len(chosen) < _MOST_FIRST or (kind not in seen and len(chosen) < _MOST_MEASURED):
            chosen.append(candidate)
            seen.add(kind)
    return chosen
