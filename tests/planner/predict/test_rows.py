"""Memory rows against the memory model's own scan, and a pipeline worked by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from oracles.orders import stage_operations
from oracles.peak_bytes import peak_bytes
from oracles.transfers import transfer_bytes
from planner_cases import (
    batched,
    cut,
    memory_of,
    small_pipelines,
    tiny_setup,
)

from ds_infinipipe.planner.facts.setup import Layout
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.order import window_size
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.rows import MemoryRows, PipelineMemory, recompute_counts


@dataclass
class RoundNumbers:
    """A memory model with numbers one can add by hand: 10 bytes a token kept, 4 recomputed."""

    layout: Layout
    static_bytes: tuple[int, ...]

    def saved_bytes(self, chunk: Chunk) -> int:
        return 10 * chunk.tokens

    def input_bytes(self, chunk: Chunk) -> int:
        return 4 * chunk.tokens

    def output_bytes(self, stage: int, chunk: Chunk) -> int:
        return chunk.tokens

    def arena_bytes(self, sequence_len: int) -> int:
        return 2 * sequence_len

    def kv_grad_bytes(self, context_len: int) -> int:
        return 3 * context_len

    def forward_transient(self, stage: int, chunk: Chunk, recompute: int) -> int:
        return 6 * chunk.tokens if recompute else 0

    def backward_transient(self, stage: int, chunk: Chunk, recompute: int) -> int:
        return chunk.tokens + (6 * chunk.tokens if recompute else 0)


def one_stage_by_hand() -> PipelineMemory:
    """A sequence of 3 + 2 tokens in two slices on one stage of one layer: F0 F1 B1 B0."""
    memory = RoundNumbers(Layout(1, 1, 1, (1,)), (100,))
    return memory_of(cut(0, 3, 2), memory)  # type: ignore[arg-type]


def test_moments_of_two_slices_by_hand() -> None:
    (moments,) = one_stage_by_hand().stages
    # F0: 100 + arena 10 + 33; F1: + 22; B1: + dK/dV 9; B0: - 22
    assert moments.base.tolist() == [143, 165, 174, 152]
    assert moments.plain.tolist() == [0, 0, 2, 3]
    assert moments.every.tolist() == [18, 12, 14, 21]
    assert moments.live_saving.tolist() == [18, 30, 30, 18]


def test_peaks_with_one_chunk_recomputed_by_hand() -> None:
    pipeline = one_stage_by_hand()
    assert pipeline.peaks(np.array([[0, 0]])).tolist() == [176]
    # B1: 174 + 14 - 12 with only the tail recomputed, 174 + 2 - 18 with only the first slice
    assert pipeline.peaks(np.array([[0, 1]])).tolist() == [176]
    assert pipeline.peaks(np.array([[1, 0]])).tolist() == [158]


def test_rows_by_hand_keep_only_the_moment_that_implies_the_others() -> None:
    rows = one_stage_by_hand().rows(170)
    assert rows is not None
    # only B1 is above the limit: 18 c(first) >= 174 + 2 - 170; recomputing the tail's only layer
    # takes the 12 bytes it saves again to rebuild it
    assert rows.need.tolist() == [6]
    entries = zip(
        rows.variable.tolist(), rows.coefficient.tolist(), rows.last.tolist(), strict=True
    )
    # the tail runs its backward first
    assert sorted(entries) == [(0, 12, 0), (1, 18, 18)]


def test_no_rows_where_everything_fits_and_none_where_nothing_does() -> None:
    pipeline = one_stage_by_hand()
    fitting = pipeline.rows(176)
    assert fitting is not None and fitting.is_empty
    # fully recomputed, B1 needs 174 + 14 - 30 = 158 and B0 152 + 21 - 18 = 155
    assert pipeline.rows(158) is not None
    assert pipeline.rows(157) is None


def test_counts_shift_by_one_variable_per_stage_and_stop_at_its_layers() -> None:
    memory = MemoryModel(tiny_setup(3, 2))
    pipeline = memory_of([batched(0, 8), batched(1, 6)], memory)
    counts = recompute_counts(pipeline, np.array([2, 0, 1]))
    assert counts.tolist() == [[0, 1], [1, 0]]


def _scan(chunks: tuple[Chunk, ...], memory: MemoryModel, counts: np.ndarray) -> list[int]:
    pipeline, pp = memory_of(chunks, memory), memory.layout.pp
    operations = [
        stage_operations(
            pipeline.forward, pipeline.backward, window_size(pp, stage, pipeline.num_split)
        )
        for stage in range(pp)
    ]
    transfers = transfer_bytes(operations, [memory.input_bytes(chunk) for chunk in chunks])
    return [
        peak_bytes(
            memory,
            stage,
            row,
            chunks,
            dict(zip(pipeline.forward, counts[stage].tolist(), strict=True)),
            transfers[stage],
        )
        for stage, row in enumerate(operations)
    ]


def _holds(rows: MemoryRows, pipeline: PipelineMemory, variables: np.ndarray) -> bool:
    layers = np.array(pipeline.layout.stage_layers)[rows.stage[rows.row]]
    counts = np.minimum(variables[rows.variable], layers)
    saved = rows.coefficient * counts - (rows.coefficient - rows.last) * (counts == layers)
    covered = np.bincount(rows.row, weights=saved, minlength=rows.need.size)
    return bool((covered >= rows.need).all())


@given(case=small_pipelines(), seed=st.integers(0, 2**16))
@examples(100)
def test_peaks_equal_the_memory_models_own_scan(
    case: tuple[tuple[Chunk, ...], MemoryModel], seed: int
) -> None:
    chunks, memory = case
    pipeline = memory_of(chunks, memory)
    layers = np.array(memory.layout.stage_layers)[:, None]
    counts = np.random.default_rng(seed).integers(0, layers + 1, (memory.layout.pp, len(chunks)))
    assert pipeline.peaks(counts).tolist() == _scan(chunks, memory, counts)


@given(case=small_pipelines(), seed=st.integers(0, 2**16), share=st.floats(0.0, 1.0))
@examples(100)
def test_rows_hold_exactly_where_the_scan_fits(
    case: tuple[tuple[Chunk, ...], MemoryModel], seed: int, share: float
) -> None:
    chunks, memory = case
    pipeline = memory_of(chunks, memory)
    most = max(memory.layout.stage_layers)
    limit = _between(pipeline, share)
    rows = pipeline.rows(limit)
    assert rows is not None
    variables = np.random.default_rng(seed).integers(0, most + 1, pipeline.num_variables)
    fits = bool((pipeline.peaks(recompute_counts(pipeline, variables)) <= limit).all())
    assert _holds(rows, pipeline, variables) == fits


@given(case=small_pipelines(), share=st.floats(0.0, 1.0))
@examples(100)
def test_rows_are_refused_exactly_where_full_recomputation_does_not_fit(
    case: tuple[tuple[Chunk, ...], MemoryModel], share: float
) -> None:
    chunks, memory = case
    pipeline = memory_of(chunks, memory)
    full = np.array(memory.layout.stage_layers)[:, None] * np.ones((1, len(chunks)), dtype=int)
    least = int((pipeline.peaks(full)).max())
    assert pipeline.rows(least) is not None
    assert pipeline.rows(least - 1) is None


@given(case=small_pipelines(), share=st.floats(-0.1, 1.1))
@examples(100)
def test_the_uniform_count_is_the_smallest_that_the_scan_accepts(
    case: tuple[tuple[Chunk, ...], MemoryModel], share: float
) -> None:
    chunks, memory = case
    pipeline = memory_of(chunks, memory)
    limit = _between(pipeline, share)
    layers = np.array(memory.layout.stage_layers)[:, None]
    accepted = [
        count
        for count in range(int(layers.max()) + 1)
        if (
            pipeline.peaks(np.minimum(count, layers) * np.ones((1, len(chunks)), dtype=int))
            <= limit
        ).all()
    ]
    assert pipeline.uniform_count(limit) == (accepted[0] if accepted else None)


def _between(pipeline: PipelineMemory, share: float) -> int:
    """A limit between the peaks of full and of no recomputation (beyond them outside 0 to 1)."""
    shape = np.ones((1, len(pipeline.forward)), dtype=int)
    layers = np.array(pipeline.layout.stage_layers)[:, None]
    least, most = (int(pipeline.peaks(n * shape).max()) for n in (layers, 0 * layers))
    return round(least + share * (most - least))
