"""Grouping by dynamic programming against every partition there is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import batched, cut

from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.search.paper.grouping import Partition, partition_classes, slice_classes

Costs = dict[tuple[int, int], float | None]


def every_partition(num_classes: int) -> Iterator[Partition]:
    """All splits of classes 0..num_classes into consecutive runs."""
    for mask in range(2 ** (num_classes - 1)):
        ends = [i + 1 for i in range(num_classes - 1) if mask >> i & 1] + [num_classes]
        yield tuple(zip([0, *ends[:-1]], ends, strict=True))


def cost_of(runs: Partition, overhead_s: float, costs: Costs) -> float:
    parts = [costs[run] for run in runs]
    return sum(math.inf if part is None else part + overhead_s for part in parts)


@st.composite
def grouping_cases(draw: st.DrawFn) -> tuple[int, float, Costs]:
    num_classes = draw(st.integers(1, 6))
    cost = st.one_of(st.none(), st.integers(0, 20).map(float))
    costs = {(first, end): draw(cost) for end in range(1, num_classes + 1) for first in range(end)}
    return num_classes, float(draw(st.integers(0, 8))), costs


@given(grouping_cases())
@examples(100)
def test_dynamic_programming_equals_exhaustive_search(case: tuple[int, float, Costs]) -> None:
    num_classes, overhead_s, costs = case
    found = partition_classes(num_classes, overhead_s, lambda i, j, _: costs[i, j])
    best = min(cost_of(runs, overhead_s, costs) for runs in every_partition(num_classes))
    if math.isinf(best):
        assert found is None
    else:
        assert found is not None
        assert found[0] == pytest.approx(best)
        assert cost_of(found[1], overhead_s, costs) == pytest.approx(best)


@given(grouping_cases(), st.integers(0, 60))
@examples(100)
def test_a_cutoff_keeps_the_optimum_or_reports_that_none_is_below(
    case: tuple[int, float, Costs], cutoff_s: int
) -> None:
    num_classes, overhead_s, costs = case

    def pruning(first: int, end: int, limit_s: float) -> float | None:
        cost_s = costs[first, end]
        return None if cost_s is None or cost_s >= limit_s else cost_s

    best = min(cost_of(runs, overhead_s, costs) for runs in every_partition(num_classes))
    found = partition_classes(num_classes, overhead_s, pruning, cutoff_s)
    if best < cutoff_s:
        assert found is not None
        assert found[0] == pytest.approx(best)
    else:
        assert found is None


def test_one_pipeline_is_kept_while_recomputation_costs_less_than_another() -> None:
    costs: Costs = {(0, 1): 0.0, (1, 2): 1.0, (0, 2): 3.0}
    assert partition_classes(2, 2.5, lambda i, j, _: costs[i, j]) == (5.5, ((0, 2),))
    assert partition_classes(2, 1.5, lambda i, j, _: costs[i, j]) == (4.0, ((0, 1), (1, 2)))


def test_a_run_that_cannot_win_is_not_solved() -> None:
    asked: list[tuple[int, int]] = []

    def recompute_s(first: int, end: int, limit_s: float) -> float:
        asked.append((first, end))
        return 0.0

    assert partition_classes(4, 1.0, recompute_s) == (1.0, ((0, 4),))
    assert asked == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_classes_are_slice_counts_and_empty_ones_are_left_out() -> None:
    chunks = [*cut(0, 4, 4, 4), batched(1, 3, 2), *cut(3, 6, 6), *cut(4, 5, 5), batched(5, 9)]
    assert slice_classes(chunks) == ((3, 8), (4, 5, 6, 7), (0, 1, 2))


def test_a_hybrid_chunk_goes_with_its_cut_sequence() -> None:
    first, tail = cut(0, 4, 4)
    hybrid = Chunk((*tail.slices, Slice(7, 0, 3, True)))
    assert slice_classes([first, hybrid, batched(8, 2)]) == ((2,), (0, 1))
