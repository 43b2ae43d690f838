"""The product's promise: whatever the plan, gradients are those of plain training."""

from __future__ import annotations

import itertools
import logging
import shutil
import warnings
from dataclasses import replace
from unittest import mock

import pytest
from effort import is_thorough
from ranks import run_ranks, run_strict

from ds_infinipipe.checks.exactness import (
    FLOAT32_LIMIT,
    FLOAT64_LIMIT,
    Case,
    StepDifference,
    compare_steps,
    reference_curve,
)
from ds_infinipipe.model.compiling import compile_block

pytestmark = pytest.mark.ranks

STEPS, RANDOM_STEPS, SEQUENCES = (3, 25, 8) if is_thorough() else (2, 8, 5)
LAYOUTS = [(2, 2), (4, 1), (1, 4), (1, 1), (3, 1)]
FAMILIES = [("llama", False), ("qwen2", True), ("qwen3", False)]


def _quiet() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)


def _compare(rank: int, cases: list[Case]) -> list[list[StepDifference]]:
    _quiet()
    return [compare_steps(case) for case in cases]


def _curve(rank: int, case: Case) -> tuple[list[float], list[float]]:
    _quiet()
    return reference_curve(case)


def _all_differences(cases: list[Case], backend: str = "strict") -> list[list[StepDifference]]:
    """Per case, the differences of all ranks and steps."""
    world_size = cases[0].pp * cases[0].sp * cases[0].dp
    by_rank = run_ranks(_compare, world_size, cases, timeout=240.0, backend=backend)
    return [[d for rank in by_rank for d in rank[index]] for index in range(len(cases))]


def _small(case: Case) -> Case:
    """Stages of one or two layers."""
    layers = 2 if case.pp == 1 else 4
    return replace(case, steps=STEPS, num_sequences=SEQUENCES, num_layers=layers)


@pytest.mark.parametrize(("pp", "sp"), LAYOUTS)
def test_float64_loss_and_every_gradient_equal_the_reference(pp: int, sp: int) -> None:
    cases = [
        Case(kind, pp, sp, zero_stage=0, float64=True, tied=tied, seed=seed)
        for seed, (kind, tied) in enumerate(FAMILIES)
    ]
    cases = [_small(case) for case in cases]
    for case, differences in zip(cases, _all_differences(cases), strict=True):
        assert len(differences) == case.steps * pp * sp
        for d in differences:
            assert d.loss_error <= FLOAT64_LIMIT, (case, d)
            assert d.gradient_error <= FLOAT64_LIMIT, (case, d)
            assert d.norm_error <= FLOAT64_LIMIT, (case, d)


@pytest.mark.parametrize(("pp", "sp"), LAYOUTS)
def test_float32_zero3_steps_equal_the_reference_at_equal_weights(pp: int, sp: int) -> None:
    cases = [
        Case(kind, pp, sp, tied=tied, seed=10 + seed)
        for seed, (kind, tied) in enumerate([*FAMILIES, ("mistral", True), ("llama", True)])
    ]
    cases = [_small(case) for case in cases]
    for case, differences in zip(cases, _all_differences(cases), strict=True):
        for d in differences:
            assert d.loss_error <= FLOAT32_LIMIT, (case, d)
            assert d.gradient_error <= FLOAT32_LIMIT, (case, d)
            assert d.norm_error <= FLOAT32_LIMIT, (case, d)


def test_many_random_plans_are_exact_and_cover_pipelines_recompute_and_splits() -> None:
    case = Case(
        "llama", 2, 2, zero_stage=0, float64=True, steps=RANDOM_STEPS, seed=77, num_sequences=12
    )
    [differences] = _all_differences([case])
    assert max(d.gradient_error for d in differences) <= FLOAT64_LIMIT
    assert max(d.loss_error for d in differences) <= FLOAT64_LIMIT
    assert {d.pipelines for d in differences} >= {1, 2, 3}
    assert any(d.recomputed_layers > 0 for d in differences)
    assert sum(d.split_backwards > 0 for d in differences) >= len(differences) // 2
    assert any(d.split_backwards == 0 for d in differences)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sp"),
    [(4, 1, 2), (4, 1, 4), (3, 3, 2), (6, 6, 4), (12, 4, 4), (28, 4, 2)],
)
def test_head_counts_that_sp_does_not_divide_are_exact(heads: int, kv_heads: int, sp: int) -> None:
    case = Case(
        "llama",
        1,
        sp,
        zero_stage=0,
        float64=True,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_layers=2,
        num_sequences=SEQUENCES,
        steps=2,
    )
    [differences] = _all_differences([case])
    assert max(d.gradient_error for d in differences) <= FLOAT64_LIMIT


def test_sliding_windows_are_exact() -> None:
    window = {"model_type": "mistral", "sliding_window": 7, "steps": 2, "num_sequences": SEQUENCES}
    cases = [Case(pp=2, sp=2, zero_stage=0, float64=True, **window), Case(pp=2, sp=2, **window)]
    limits = (FLOAT64_LIMIT, FLOAT32_LIMIT)
    for limit, differences in zip(limits, _all_differences(cases), strict=True):
        assert max(max(d.loss_error, d.gradient_error) for d in differences) <= limit


def _compare_traced(rank: int, case: Case) -> list[StepDifference]:
    """Traced only, which takes a fraction of the time; see test_compiling."""
    _quiet()
    backend = "aot_eager" if is_thorough() else "eager"
    with mock.patch.object(compile_block, "__defaults__", (backend,)):
        return compare_steps(case)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_layers_are_exact_under_zero3_with_recompute() -> None:
    # no chunk of one token, which has graphs of its own
    case = Case("llama", 1, 2, compiled=True, num_layers=1, steps=1, alignment=4)
    differences = [d for rank in run_strict(_compare_traced, 2, case, timeout=240.0) for d in rank]
    for d in differences:
        assert d.loss_error <= FLOAT32_LIMIT and d.gradient_error <= FLOAT32_LIMIT, d
    assert any(d.recomputed_layers for d in differences)


def test_aligned_slices_are_exact() -> None:
    cases = [Case("qwen3", 2, 2, zero_stage=0, float64=True, alignment=a, seed=a) for a in (3, 8)]
    cases = [_small(case) for case in cases]
    for differences in _all_differences(cases):
        assert max(d.gradient_error for d in differences) <= FLOAT64_LIMIT


def test_steps_over_gloo_are_exact() -> None:
    cases = [_small(Case("qwen3", 2, 2, zero_stage=0, float64=True)), _small(Case("llama", 2, 2))]
    limits = (FLOAT64_LIMIT, FLOAT32_LIMIT)
    for limit, differences in zip(limits, _all_differences(cases, "gloo"), strict=True):
        for d in differences:
            assert max(d.loss_error, d.gradient_error, d.norm_error) <= limit, d


def test_batches_of_fewer_chunks_than_stages_are_exact_where_pairs_connect_late() -> None:
    """Nothing is buffered, and the first transfer between two ranks holds up both of them."""
    case = Case("llama", 4, 1, zero_stage=0, float64=True, tied=True, num_sequences=2, max_tokens=9)
    for d in _all_differences([case], "lazy")[0]:
        assert max(d.loss_error, d.gradient_error, d.norm_error) <= FLOAT64_LIMIT, d


@pytest.mark.parametrize(("pp", "sp"), [(2, 2)])
def test_a_loss_curve_of_20_steps_follows_the_reference(pp: int, sp: int) -> None:
    case = Case(
        "llama", pp, sp, num_layers=2, steps=20, seed=3, num_sequences=4, learning_rate=3e-3
    )
    mine, theirs = run_strict(_curve, pp * sp, case, timeout=240.0)[0]
    assert len(mine) == 20
    assert mine == pytest.approx(theirs, abs=1e-3)
    assert max(abs(a - b) for a, b in itertools.pairwise(mine)) > 1e-3


def test_replicas_with_plans_of_their_own_are_exact_even_without_a_sequence() -> None:
    cases = [
        Case("llama", 1, 2, 2, zero_stage=0, float64=True),
        Case("qwen2", 2, 1, 2, zero_stage=0, float64=True, tied=True, num_sequences=2, steps=6),
        Case("llama", 1, 1, 4, zero_stage=0, float64=True, num_sequences=3, steps=4),
    ]
    for differences in _all_differences(cases):
        assert max(d.loss_error for d in differences) <= FLOAT64_LIMIT
        assert max(d.gradient_error for d in differences) <= FLOAT64_LIMIT
        assert max(d.norm_error for d in differences) <= FLOAT64_LIMIT


def test_replicas_under_zero3_are_exact() -> None:
    cases = [
        Case("llama", 1, 2, 2, tied=True),
        Case("qwen3", 2, 1, 2, num_sequences=3),
        Case("qwen2", 2, 1, 2, tied=True, num_sequences=3, seed=4),
    ]
    cases = [replace(case, steps=STEPS) for case in cases]
    for differences in _all_differences(cases):
        assert max(d.loss_error for d in differences) <= FLOAT32_LIMIT
        assert max(d.gradient_error for d in differences) <= FLOAT32_LIMIT
        assert max(d.norm_error for d in differences) <= FLOAT32_LIMIT


def test_loss_weights_are_exact_in_slices_packs_and_replicas() -> None:
    cases = [
        Case("llama", 2, 2, zero_stage=0, float64=True, weighted=True),
        Case("qwen3", 2, 1, 2, zero_stage=0, float64=True, weighted=True, seed=1),
    ]
    cases = [_small(case) for case in cases]
    for differences in _all_differences(cases):
        assert max(d.loss_error for d in differences) <= FLOAT64_LIMIT
        assert max(d.gradient_error for d in differences) <= FLOAT64_LIMIT
