"""Memory of one pipeline as linear rows in the recompute counts (Eq. 19 and 20, exact form).

Every F and every B of a stage is a moment with a live set W of chunks between their F and their B.
With c(k) recomputed layers the moment needs, in bytes,

    base + transient - sum over W of saving(k) * c(k),   saving = saved - input bytes of one layer

which must not exceed the limit. The transient of the chunk at work is larger once it recomputes
every layer of the stage, so its last layer saves less in its own moments than elsewhere; with that,
a choice of counts keeps the rows exactly where it fits.
Deviation: the paper's windows leave out what only the executor shows: K/V arenas, dK/dV of the
sequence in backward, and the transients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.facts.setup import Layout
from ds_infinipipe.planner.plan.order import count_slices
from ds_infinipipe.planner.predict.ledger import Ledger, StageMoments, dominated
from ds_infinipipe.planner.predict.schedule import ScheduleArrays, static_schedule

__all__ = ["MemoryRows", "PipelineMemory", "pipeline_memory", "recompute_counts"]

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class MemoryRows:
    """Rows `sum of coefficient * c(stage, variable) >= need` in coordinate form.

    Arrays `row`, `variable`, `coefficient` and `last` are [entry]; `need` and `stage` are [row].
    The count of stage p and variable v is min(C[v], layers of p), Eq. 16; the last layer of the
    stage counts `last`, at most `coefficient`.
    """

    row: IntArray
    variable: IntArray
    coefficient: IntArray
    last: IntArray
    need: IntArray
    stage: IntArray

    @property
    def is_empty(self) -> bool:
        return self.need.size == 0


@dataclass(frozen=True, eq=False)
class PipelineMemory:
    """Operations of one pipeline, its variables, and what its chunks need.

    `transfers` [pp, m] are the bytes in transfer beside the operations.
    """

    ledger: Ledger
    schedule: ScheduleArrays
    num_split: int
    transfers: IntArray

    @property
    def layout(self) -> Layout:
        return self.ledger.layout

    @cached_property
    def forward(self) -> tuple[int, ...]:
        return tuple(self.schedule.forward.tolist())

    @cached_property
    def backward(self) -> tuple[int, ...]:
        return tuple(self.schedule.backward.tolist())

    @cached_property
    def position(self) -> IntArray:
        """Of each chunk in the backward order (f2b), -1 for chunks outside."""
        position = np.full(self.ledger.shape[1], -1, dtype=np.int64)
        position[self.schedule.backward] = np.arange(self.schedule.backward.size)
        return position

    @cached_property
    def stages(self) -> tuple[StageMoments, ...]:
        return self.ledger.moments(self.schedule, self.transfers)

    @property
    def num_variables(self) -> int:
        """n + pp - 1, the length of C in Eq. 15."""
        return len(self.forward) + self.layout.pp - 1

    def peaks(self, counts: IntArray) -> IntArray:
        """Largest bytes of every stage for counts[stage, i] of forward[i]."""
        spread = np.zeros(self.ledger.shape, dtype=np.int64)
        spread[:, self.schedule.forward] = counts
        return self.ledger.peaks(self.schedule, spread, self.transfers)

    def uniform_count(self, limit_bytes: int) -> int | None:
        """Smallest number of layers that fits when every chunk and stage recomputes it, or None."""
        needed = 0
        for moments in self.stages:
            over_plain = moments.base + moments.plain - limit_bytes
            over = moments.base + moments.every - limit_bytes
            if (over_plain <= 0).all():
                continue
            layers = int((-(-over_plain // np.maximum(moments.live_saving, 1))).max())
            if layers >= moments.layers and (over > moments.most_saving).any():
                return None
            needed = max(needed, min(layers, moments.layers))
        return needed

    def rows(self, limit_bytes: int) -> MemoryRows | None:
        """Rows that can bind, or None when one asks more than recomputing every layer gives."""
        parts = [self._stage_rows(moments, limit_bytes) for moments in self.stages]
        kept = [part for part in parts if part is not None]
        if len(kept) < len(parts):
            return None
        offsets = np.cumsum([0] + [part.need.size for part in kept])
        return MemoryRows(
            np.concatenate([part.row + o for part, o in zip(kept, offsets, strict=False)]),
            *(
                np.concatenate([getattr(part, name) for part in kept])
                for name in ("variable", "coefficient", "last", "need", "stage")
            ),
        )

    def _stage_rows(self, moments: StageMoments, limit_bytes: int) -> MemoryRows | None:
        saving = self.ledger.saving[moments.chunk]
        lost = np.maximum(moments.every - moments.plain, 0)
        need = moments.base + moments.plain + np.maximum(lost - saving, 0) - limit_bytes
        lost, own = np.minimum(lost, saving), moments.layers * saving
        binds = (moments.base + moments.plain > limit_bytes) | (need + lost > own)
        if (need + lost > moments.most_saving)[binds].any():
            return None
        binding = np.flatnonzero(binds & ~dominated(moments, need, own, lost, binds))
        chunks = self.schedule.forward
        entered, left = self._lifetimes(moments)
        live = (entered[None] <= binding[:, None]) & (binding[:, None] <= left[None])
        row, column = np.nonzero(live)
        chunk, at = chunks[column], binding[row]
        is_own = chunk == moments.chunk[at]
        return MemoryRows(
            row,
            self.position[chunk] + self.layout.pp - 1 - moments.stage,
            self.ledger.saving[chunk],
            self.ledger.saving[chunk] - np.where(is_own, lost[at], 0),
            need[binding],
            np.full(binding.size, moments.stage, dtype=np.int64),
        )

    def _lifetimes(self, moments: StageMoments) -> tuple[IntArray, IntArray]:
        """Moments of F and of B of every chunk, arrays [position in forward]."""
        at = np.arange(moments.chunk.size)
        times = np.zeros((2, self.position.size), dtype=np.int64)
        times[moments.is_backward.astype(np.int64), moments.chunk] = at
        chosen = times[:, self.schedule.forward]
        return chosen[0], chosen[1]


def pipeline_memory(ledger: Ledger, members: Sequence[int]) -> PipelineMemory:
    """The pipeline that `members` form, of the chunks of the ledger."""
    schedule = static_schedule(ledger.chunks, ledger.layout.pp, members)
    num_split = count_slices(ledger.chunks, members)
    return PipelineMemory(ledger, schedule, num_split, ledger.transfers(schedule))


def recompute_counts(pipeline: PipelineMemory, variables: IntArray) -> IntArray:
    """Eq. 16 with 0-based stages: counts[p, i] = min(C[f2b + pp - 1 - p], layers of p)."""
    layout = pipeline.layout
    at = pipeline.position[pipeline.schedule.forward]
    return np.array(
        [
            np.minimum(variables[at + layout.pp - 1 - stage], layers)
            for stage, layers in enumerate(layout.stage_layers)
        ]
    )
