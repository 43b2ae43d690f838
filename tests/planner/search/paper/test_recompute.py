"""Algorithm 2 against enumeration, and the chain of fallbacks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from planner_cases import (
    batched,
    cut,
    memory_of,
    small_pipelines,
    tiny_setup,
)

from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Layout
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.rows import PipelineMemory, recompute_counts
from ds_infinipipe.planner.search.paper import recompute
from ds_infinipipe.planner.search.paper.recompute import RecomputeSolution, solve_recompute

EXACT = PlannerSettings(relative_gap=0.0)


def limit_between(pipeline: PipelineMemory, share: float) -> int:
    """Bytes between the peaks of full (0) and of no recomputation (1)."""
    ones = np.ones((1, len(pipeline.forward)), dtype=int)
    layers = np.array(pipeline.layout.stage_layers)[:, None]
    least, most = (int(pipeline.peaks(n * ones).max()) for n in (layers, 0 * layers))
    return round(least + share * (most - least))


def fits(pipeline: PipelineMemory, variables: Any, limit: int) -> bool:
    counts = recompute_counts(pipeline, np.array(variables))
    return bool((pipeline.peaks(counts) <= limit).all())


def fits_rows(pipeline: PipelineMemory, variables: Any, limit: int) -> bool:
    """As the rows count: of a chunk's transients without and with some of its layers recomputed,
    which the scan tells apart, they have the larger."""
    counts = np.zeros(pipeline.ledger.shape, dtype=np.int64)
    counts[:, pipeline.schedule.forward] = recompute_counts(pipeline, np.array(variables))
    for moments, row in zip(pipeline.stages, counts, strict=True):
        of_chunk = row[moments.chunk]
        saved = pipeline.ledger.saving[moments.chunk] * of_chunk
        entered = np.cumsum(np.where(moments.is_backward, 0, saved))
        left = np.cumsum(np.where(moments.is_backward, saved, 0))
        live = entered - left + np.where(moments.is_backward, saved, 0)
        most = np.maximum(moments.plain, moments.every)
        transient = np.where(of_chunk >= moments.layers, most, moments.plain)
        if (moments.base + transient - live > limit).any():
            return False
    return True


def every_choice(pipeline: PipelineMemory) -> Any:
    most = max(pipeline.layout.stage_layers)
    return product(range(most + 1), repeat=pipeline.num_variables)


@given(case=small_pipelines(max_sequences=2, max_layers=3), share=st.floats(0.0, 1.0))
@examples(100)
def test_cp_sat_equals_enumeration_by_the_memory_scan(
    case: tuple[tuple[Chunk, ...], MemoryModel], share: float
) -> None:
    chunks, memory = case
    pipeline = memory_of(chunks, memory)
    assume((max(memory.layout.stage_layers) + 1) ** pipeline.num_variables <= 1000)
    limit = limit_between(pipeline, share)
    choices = list(every_choice(pipeline))
    best = min(sum(c) for c in choices if fits_rows(pipeline, c, limit))
    assert best >= min(sum(c) for c in choices if fits(pipeline, c, limit))
    solution = solve_recompute(pipeline, limit, EXACT)
    assert solution is not None
    assert (solution.total, solution.bound, solution.status) == (best, best, "optimal")
    assert sum(solution.variables) == best
    assert fits(pipeline, solution.variables, limit)


@given(case=small_pipelines(), share=st.floats(0.0, 1.0), is_trial=st.booleans())
@examples(100)
def test_every_solution_fits_and_is_within_its_stated_gap(
    case: tuple[tuple[Chunk, ...], MemoryModel], share: float, is_trial: bool
) -> None:
    chunks, memory = case
    pipeline = memory_of(chunks, memory)
    limit = limit_between(pipeline, share)
    solution = solve_recompute(pipeline, limit, is_trial=is_trial)
    assert solution is not None
    assert fits(pipeline, solution.variables, limit)
    assert solution.bound <= solution.total
    if solution.status == "optimal":
        assert solution.total - solution.bound <= 0.02 * solution.total


def tight_pipeline(num_layers: int = 4, pp: int = 2) -> tuple[PipelineMemory, int]:
    """Two cut sequences and a batched chunk where about half of the layers must go."""
    memory = MemoryModel(tiny_setup(num_layers, pp, loss_block_tokens=8))
    chunks = [*cut(0, 90, 70, 50), *cut(1, 80, 45), batched(2, 60, 40)]
    pipeline = memory_of(chunks, memory)
    return pipeline, limit_between(pipeline, 0.5)


def test_nothing_is_recomputed_where_everything_fits() -> None:
    pipeline, _ = tight_pipeline()
    solution = solve_recompute(pipeline, limit_between(pipeline, 1.0))
    assert solution == RecomputeSolution((0,) * pipeline.num_variables, 0, 0, "optimal")


def test_none_where_full_recomputation_does_not_fit() -> None:
    pipeline, _ = tight_pipeline()
    assert solve_recompute(pipeline, limit_between(pipeline, 0.0)) is not None
    assert solve_recompute(pipeline, limit_between(pipeline, 0.0) - 1) is None


def test_equal_seeds_give_equal_solutions() -> None:
    pipeline, limit = tight_pipeline()
    assert solve_recompute(pipeline, limit) == solve_recompute(pipeline, limit)


def test_a_cutoff_at_the_proven_bound_ends_the_solve() -> None:
    pipeline, limit = tight_pipeline()
    solution = solve_recompute(pipeline, limit, EXACT)
    assert solution is not None and solution.total > 0
    assert solve_recompute(pipeline, limit, EXACT, cutoff=0.5) is None
    assert solve_recompute(pipeline, limit, EXACT, cutoff=solution.total + 1) == solution


def test_smaller_stages_recompute_at_most_their_own_layers() -> None:
    uneven = replace(tiny_setup(4, 2, loss_block_tokens=8), layout=Layout(2, 1, 1, (3, 1)))
    memory = MemoryModel(uneven)
    pipeline = memory_of([*cut(0, 90, 70), batched(1, 60, 40)], memory)
    solution = solve_recompute(pipeline, limit_between(pipeline, 0.05), EXACT)
    assert solution is not None
    counts = solution.counts(pipeline)
    assert counts[0].max() == 3
    assert counts[1].max() == 1


def test_without_an_answer_of_cp_sat_the_rounded_relaxation_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline, limit = tight_pipeline()
    monkeypatch.setattr(recompute, "round_relaxation", lambda problem, point: problem.upper.copy())
    monkeypatch.setattr(recompute, "_cp_sat", lambda *_: (None, 0, False))
    solution = solve_recompute(pipeline, limit, EXACT)
    assert solution is not None
    assert solution.status == "feasible"
    assert solution.total > solution.bound > 0
    assert fits(pipeline, solution.variables, limit)


def test_without_a_relaxation_the_rounding_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, limit = tight_pipeline()
    monkeypatch.setattr(recompute, "relax", lambda _: None)
    monkeypatch.setattr(recompute, "_cp_sat", lambda *_: (None, 0, False))
    solution = solve_recompute(pipeline, limit)
    assert solution is not None
    assert solution.bound == 0
    assert fits(pipeline, solution.variables, limit)


def test_an_answer_that_breaks_the_scan_is_replaced_by_the_smallest_uniform_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline, limit = tight_pipeline()
    monkeypatch.setattr(recompute, "round_relaxation", lambda problem, point: 0 * problem.upper)
    monkeypatch.setattr(recompute, "_cp_sat", lambda *_: (None, 0, False))
    solution = solve_recompute(pipeline, limit)
    uniform = pipeline.uniform_count(limit)
    assert solution is not None and uniform is not None
    assert solution.status == "fallback"
    assert set(solution.variables) == {uniform}


def test_the_solver_stops_at_its_limit_with_a_solution_that_fits() -> None:
    memory = MemoryModel(tiny_setup(8, 4, loss_block_tokens=8))
    sizes = np.random.default_rng(3).integers(20, 200, (20, 3)).tolist()
    pipeline = memory_of([c for i, n in enumerate(sizes) for c in cut(i, *n)], memory)
    limit = limit_between(pipeline, 0.6)
    hurried = PlannerSettings(relative_gap=0.0, solver_time_limit_s=1e-9)
    solution = solve_recompute(pipeline, limit, hurried)
    assert solution is not None
    assert solution.status == "feasible"
    assert solution.total > solution.bound
    assert fits(pipeline, solution.variables, limit)


def test_greedy_recomputes_the_same_number_everywhere() -> None:
    pipeline, limit = tight_pipeline()
    solution = solve_recompute(pipeline, limit, PlannerSettings(solver="greedy"))
    assert solution is not None
    assert set(solution.variables) == {pipeline.uniform_count(limit)}
    assert fits(pipeline, solution.variables, limit)


def test_recompute_none_is_refused_where_it_does_not_fit() -> None:
    pipeline, limit = tight_pipeline()
    never = PlannerSettings(recompute="none")
    assert solve_recompute(pipeline, limit, never) is None
    solution = solve_recompute(pipeline, limit_between(pipeline, 1.0), never)
    assert solution is not None and solution.total == 0


def test_recompute_full_takes_every_layer_even_where_none_is_needed() -> None:
    pipeline, _ = tight_pipeline(num_layers=5)
    always = PlannerSettings(recompute="full")
    solution = solve_recompute(pipeline, limit_between(pipeline, 1.0), always)
    assert solution is not None
    assert solution.counts(pipeline).tolist() == [[3] * 6, [2] * 6]
    assert solve_recompute(pipeline, limit_between(pipeline, 0.0) - 1, always) is None
