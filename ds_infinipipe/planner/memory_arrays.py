"""Memory of whole schedules as arrays: peaks, moments and rows for any windows, compiled.

The same figures as MemoryModel.peak_bytes and rows.py, for any operation lists and free recompute
counts per stage and chunk. All counts are [pp, chunks], by chunk id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.rows import StageMoments, measure_chunks
from ds_infinipipe.planner.schedule_arrays import ScheduleArrays, load_kernels
from ds_infinipipe.planner.types import Chunk

__all__ = ["MemoryArrays", "StageRows", "measure_memory"]

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StageRows:
    """Rows `sum over row's chunks of saving[chunk] * c(chunk) >= need` of one stage.

    Compressed: row i has chunks[offsets[i] : offsets[i + 1]]. Chunks that appear in no row need no
    recomputation on the stage.
    """

    need: IntArray
    offsets: IntArray
    chunks: IntArray


@dataclass(frozen=True, eq=False)
class MemoryArrays:
    """Bytes of the chunks of one candidate on every stage; converted once, scanned often.

    With nothing recomputed F(k) adds entered[p, k], B(k) adds gradient[p, k] at its start and
    removes released[p, k] at its end; a recomputed layer keeps saving[k] less. `transients` are
    [F or B, without or with recompute, pp, chunks], `layers` and `static` [pp].
    """

    layers: IntArray
    static: IntArray
    entered: IntArray
    gradient: IntArray
    released: IntArray
    saving: IntArray
    transients: IntArray

    def peaks(self, schedule: ScheduleArrays, counts: IntArray | None = None) -> IntArray:
        """Peak bytes of every stage, model states included."""
        if counts is None:
            counts = np.zeros(self.entered.shape, dtype=np.int64)
        counts = np.ascontiguousarray(counts, dtype=np.int64)
        peaks: IntArray = load_kernels().peak_bytes(schedule.operations, *self._arrays(), counts)
        return peaks

    def moments(self, schedule: ScheduleArrays) -> tuple[StageMoments, ...]:
        """Live bytes and what recomputing can save at every operation of every stage."""
        figures = load_kernels().scan_moments(schedule.operations, *self._arrays())
        is_backward = schedule.operations < 0
        chunk = np.where(is_backward, -schedule.operations - 1, schedule.operations)
        return tuple(
            StageMoments(
                stage, int(layers), chunk[stage], is_backward[stage], *(f[stage] for f in figures)
            )
            for stage, layers in enumerate(self.layers)
        )

    def rows(self, schedule: ScheduleArrays, limit_bytes: int) -> tuple[StageRows, ...] | None:
        """Rows that can bind, by stage; None when a stage does not fit with all recomputed.

        Counts that keep all rows fit. Some that do not may fit too: a row charges the transient of
        a recomputed layer even where the chunk at work recomputes none.
        """
        parts = []
        for moments, operations in zip(self.moments(schedule), schedule.operations, strict=True):
            rows = self._stage_rows(moments, operations, limit_bytes)
            if rows is None:
                return None
            parts.append(rows)
        return tuple(parts)

    def _stage_rows(
        self, moments: StageMoments, operations: IntArray, limit_bytes: int
    ) -> StageRows | None:
        selected = moments.binding(limit_bytes, self.saving)
        if selected is None:
            return None
        need, keeps = selected
        return StageRows(
            *load_kernels().binding_rows(operations, keeps.astype(np.int64), need, self.saving)
        )

    def _arrays(self) -> tuple[IntArray, ...]:
        return (
            self.static,
            self.entered,
            self.gradient,
            self.released,
            self.saving,
            self.transients,
        )


def measure_memory(memory: MemoryModel, chunks: Sequence[Chunk]) -> MemoryArrays:
    """Ask the memory model for every chunk once."""
    figures = measure_chunks(memory, memory.layout, chunks)
    layers = np.array(memory.layout.stage_layers, dtype=np.int64)
    per_stage = layers[:, None]
    kept = per_stage * figures.saved + figures.output
    return MemoryArrays(
        layers=layers,
        static=np.array(memory.static_bytes, dtype=np.int64),
        entered=kept + per_stage * figures.opened,
        gradient=per_stage * figures.gradient,
        released=kept + per_stage * figures.closed,
        saving=figures.saving,
        transients=np.array(
            [
                [figures.forward_plain, figures.forward_recompute],
                [figures.backward_plain, figures.backward_recompute],
            ]
        ),
    )
