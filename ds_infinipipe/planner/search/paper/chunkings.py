"""Algorithm 1 for every number of slices K: chunks, what they cost, and their pipelines.

Paper III-B and III-C.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.order import forward_order
from ds_infinipipe.planner.plan.plan import PipelinePlan
from ds_infinipipe.planner.predict.ledger import Ledger
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.rows import PipelineMemory, pipeline_memory
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel
from ds_infinipipe.planner.search.paper.chunking import chunk_sequences
from ds_infinipipe.planner.search.paper.grouping import partition_classes, slice_classes
from ds_infinipipe.planner.search.paper.recompute import RecomputeSolution, solve_recompute

__all__ = ["Candidate", "Chunking", "SolvedPipeline", "iterate_chunkings"]

# Shares of the solver's time limit. What is not solved to the gap early seldom is in ten times as
# long, and gains a layer or two of a hundred.
_TRIAL_EFFORT = 0.01
_FINAL_EFFORT = 0.25  # for all pipelines of the chosen candidate together


@dataclass(frozen=True)
class SolvedPipeline:
    """A pipeline's orders and memory, with its recompute counts."""

    memory: PipelineMemory
    solution: RecomputeSolution

    def plan(self) -> PipelinePlan:
        """As part of a plan."""
        return PipelinePlan(
            self.memory.forward,
            self.memory.backward,
            tuple(tuple(int(c) for c in row) for row in self.solution.counts(self.memory)),
            self.memory.num_split,
        )


@dataclass(frozen=True)
class Candidate:
    """Pipelines for one chunking and their proxy time, Eq. 13 plus the steady work."""

    chunking: Chunking
    pipelines: tuple[SolvedPipeline, ...]
    proxy_s: float


@dataclass(frozen=True)
class Chunking:
    """The chunks of one K with their costs and bytes, ready to be grouped.

    `k` is the number of slices asked for the longest sequence.
    """

    k: int
    chunks: tuple[Chunk, ...]
    memory: MemoryModel
    costs: ChunkCosts
    settings: PlannerSettings

    @classmethod
    def of(
        cls,
        k: int,
        chunks: tuple[Chunk, ...],
        cost: CostModel,
        memory: MemoryModel,
        settings: PlannerSettings,
    ) -> Chunking:
        return cls(k, chunks, memory, cost.chunk_costs(chunks), settings)

    @property
    def limit_bytes(self) -> int:
        return self.memory.setup.limit_bytes

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.memory, self.chunks)

    @cached_property
    def steady_s(self) -> float:
        """Sum of T_tot over the chunks, on the average stage."""
        work = self.costs.forward_s + self.costs.backward_s
        return float(work.mean(axis=0).sum())

    @property
    def overhead_s(self) -> float:
        """delta of Eq. 13: warm-up and cool-down of one pipeline, (pp - 1) * mean T_tot."""
        return (self.memory.layout.pp - 1) * self.steady_s / len(self.chunks)

    @property
    def lower_bound_s(self) -> float:
        """The proxy of one pipeline without any recomputation."""
        return self.steady_s + self.overhead_s

    def pipeline(self, members: Sequence[int]) -> PipelineMemory:
        return pipeline_memory(self.ledger, members)

    def solve(self, members: Sequence[int], below_s: float = math.inf) -> SolvedPipeline | None:
        """A trial of Algorithm 2; None if they do not fit or T_ckpt cannot be below."""
        memory = self.pipeline(members)
        solution = solve_recompute(
            memory,
            self.limit_bytes,
            self.settings,
            cutoff=below_s / self._layer_s(members),
            effort=_TRIAL_EFFORT,
            is_trial=True,
        )
        return None if solution is None else SolvedPipeline(memory, solution)

    def recompute_s(self, solved: SolvedPipeline) -> float:
        """T_ckpt of Eq. 17: mean time of one recomputed layer times the sum of C."""
        return self._layer_s(solved.memory.forward) * solved.solution.total

    def _layer_s(self, members: Sequence[int]) -> float:
        return float(np.mean(self.costs.recompute_s[list(members)]))

    def group(self, below_s: float = math.inf) -> Candidate | None:
        """Best grouping of Eq. 14 by proxy; None if none fits or none has a proxy below."""
        classes = slice_classes(self.chunks)
        solved: dict[tuple[int, int], SolvedPipeline] = {}

        def recompute_s(first: int, end: int, limit_s: float) -> float | None:
            members = [c for members in classes[first:end] for c in members]
            answer = self.solve(members, limit_s)
            if answer is None:
                return None
            solved[first, end] = answer
            return self.recompute_s(answer)

        found = partition_classes(
            len(classes), self.overhead_s, recompute_s, below_s - self.steady_s
        )
        if found is None:
            return None
        _, runs = found
        # longest sequences first between pipelines as within them
        return self._candidate(tuple(solved[run] for run in reversed(runs)))

    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """What cannot be parted: a cut sequence's chunks, or one batched chunk; longest first."""
        blocks: dict[int, list[int]] = {}
        for chunk in forward_order(self.chunks, range(len(self.chunks))):
            blocks.setdefault(self.chunks[chunk].slices[0].sequence, []).append(chunk)
        return tuple(tuple(block) for block in blocks.values())

    def fits(self, members: Sequence[int]) -> bool:
        """Whether any allowed recomputation makes one pipeline of these chunks fit."""
        greedy = self.settings.model_copy(update={"solver": "greedy"})
        return solve_recompute(self.pipeline(members), self.limit_bytes, greedy) is not None

    def split_apart(self) -> Candidate | None:
        """Blocks join the open pipeline, longest first, while it fits; None if one alone does not.

        The last resort where no grouping by slice counts fits. Deviation: the paper never parts
        sequences of equal slice count.
        """
        groups: list[tuple[int, ...]] = []
        for block in self.blocks():
            if groups and self.fits(groups[-1] + block):
                groups[-1] += block
            elif self.fits(block):
                groups.append(block)
            else:
                return None
        solved = [self.solve(group) for group in groups]
        pipelines = tuple(pipeline for pipeline in solved if pipeline is not None)
        return self._candidate(pipelines) if len(pipelines) == len(groups) else None

    def polish(self, candidate: Candidate) -> Candidate:
        """The same pipelines solved once more, with more of the solver's time."""
        effort = _FINAL_EFFORT / len(candidate.pipelines)
        pipelines = []
        for trial in candidate.pipelines:
            solution = solve_recompute(trial.memory, self.limit_bytes, self.settings, effort=effort)
            if solution is None or solution.total > trial.solution.total:
                solution = trial.solution
            pipelines.append(SolvedPipeline(trial.memory, solution))
        return self._candidate(tuple(pipelines))

    def _candidate(self, pipelines: tuple[SolvedPipeline, ...]) -> Candidate:
        recompute_s = sum(self.recompute_s(pipeline) for pipeline in pipelines)
        proxy_s = self.steady_s + len(pipelines) * self.overhead_s + recompute_s
        return Candidate(self, pipelines, proxy_s)


def iterate_chunkings(
    lengths: Sequence[int],
    cost: CostModel,
    memory: MemoryModel,
    settings: PlannerSettings,
    ks: Iterable[int] | None = None,
) -> Iterator[Chunking]:
    """Algorithm 1 for K from 1 to the slice limit, or for `ks` of them.

    A K that cuts like an earlier one is left out.
    """
    token_limit = None if settings.token_limit == "auto" else settings.token_limit
    seen: set[object] = set()
    # a slice has at least one unit, so more slices than that cut nothing finer
    finest = -(-max(lengths) // memory.setup.unit)
    most = min(settings.slice_limit(memory.layout.pp), finest)
    for k in range(1, most + 1) if ks is None else ks:
        chunks = chunk_sequences(lengths, k, cost, memory, token_limit)
        if chunks not in seen:
            seen.add(chunks)
            yield Chunking.of(k, chunks, cost, memory, settings)
