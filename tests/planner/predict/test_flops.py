"""Operations counted from slices equal a brute-force count and do not depend on the slicing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import setup_of

from ds_infinipipe.checks.random_plans import random_plan
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.time import attended_pairs, step_flops

_MODEL = ModelSpec("tiny", 4, 32, 48, 4, 2, 8, 97)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 5), (7, 3), (7, 1)])
def test_attended_pairs_are_counted_key_by_key(start: int, length: int) -> None:
    chunk = Chunk((Slice(0, start, length, True), Slice(1, 0, 4, True)))
    wanted = sum(t + 1 for t in range(start, start + length)) + 1 + 2 + 3 + 4
    assert attended_pairs(chunk) == wanted


@pytest.mark.parametrize("window", [1, 2, 5, 9, 40])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 12), (7, 3), (7, 30), (3, 6)])
def test_a_window_bounds_the_keys_of_each_query(start: int, length: int, window: int) -> None:
    chunk = Chunk((Slice(0, start, length, True), Slice(1, 0, 4, True)))
    positions = [*range(start, start + length), *range(4)]
    assert attended_pairs(chunk, window) == sum(min(t + 1, window) for t in positions)


def test_flops_of_a_windowed_model_count_its_windowed_layers() -> None:
    lengths = (37, 20, 9)
    windowed = replace(_MODEL, sliding_window=8, window_layers=3)
    plan = random_plan(
        lengths,
        np.random.default_rng(0),
        setup_of(windowed, make_layout(windowed, 2, 2), BUILTIN_CLUSTERS["cpu-local"]),
    )
    linear = 3 * 2 * sum(lengths) * (4 * _MODEL.layer_params + 97 * 32)
    full = sum(t + 1 for n in lengths for t in range(n))
    bounded = sum(min(t + 1, 8) for n in lengths for t in range(n))
    assert step_flops(plan).model == pytest.approx(linear + 3 * 4 * 32 * (full + 3 * bounded))


def test_model_flops_are_those_of_the_batch_however_it_is_cut() -> None:
    lengths = (37, 20, 9, 2)
    linear = 3 * 2 * sum(lengths) * (4 * _MODEL.layer_params + 97 * 32)
    attention = 3 * 4 * 4 * 32 * sum(n * (n + 1) // 2 for n in lengths)
    for seed in range(5):
        plan = random_plan(
            lengths,
            np.random.default_rng(seed),
            setup_of(_MODEL, make_layout(_MODEL, 2, 2), BUILTIN_CLUSTERS["cpu-local"]),
        )
        flops = step_flops(plan)
        assert flops.model == linear + attention
        recomputed = sum(sum(row) for p in plan.pipelines for row in p.recompute)
        assert (flops.recompute > 0) == (recomputed > 0)
        assert flops.recompute <= flops.model / 3
