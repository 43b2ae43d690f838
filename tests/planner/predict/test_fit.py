"""Calibration: known coefficients come back from noisy rows, and a cluster carries them on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import setup_of

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.area import CAUSAL
from ds_infinipipe.planner.predict.fit import LayerFit, ProfileRow, calibrated_cluster, fit_rows
from ds_infinipipe.planner.predict.time import CostModel, analytic_coefficients

TRUTH = {
    "linear_s": 2e-7,
    "attention_forward_s": 3e-12,
    "attention_backward_s": 9e-12,
    "overhead_forward_s": 4e-5,
    "overhead_backward_s": 9e-5,
}
SHAPES = [(t, c) for t in (256, 1024, 4096, 16384) for c in (0, t, 7 * t)]


def rows_of(noise: float, seed: int = 0) -> list[ProfileRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for tokens, context in SHAPES:
        chunk = Chunk((Slice(0, context, tokens, True),))
        area = CAUSAL.of_chunk(chunk)
        forward = TRUTH["linear_s"] * tokens + TRUTH["attention_forward_s"] * area
        backward = 2 * TRUTH["linear_s"] * tokens + TRUTH["attention_backward_s"] * area
        times = (
            (forward + TRUTH["overhead_forward_s"]) * (1 + noise * rng.standard_normal()),
            (backward + TRUTH["overhead_backward_s"]) * (1 + noise * rng.standard_normal()),
        )
        rows.append(ProfileRow.of(chunk, *times))
    return rows


def test_exact_rows_give_the_coefficients_back() -> None:
    fit = fit_rows(rows_of(0.0))
    for name, value in TRUTH.items():
        assert getattr(fit, name) == pytest.approx(value, rel=1e-6)
    assert fit.worst_error < 1e-9


@given(st.integers(0, 2**32 - 1))
@examples(30)
def test_rows_with_two_percent_noise_give_the_coefficients_nearly_back(seed: int) -> None:
    fit = fit_rows(rows_of(0.02, seed))
    for name in ("linear_s", "attention_forward_s", "attention_backward_s"):
        assert getattr(fit, name) == pytest.approx(TRUTH[name], rel=0.12)
    assert fit.median_error < 0.04


def test_the_worst_row_is_named_with_its_pass() -> None:
    rows = rows_of(0.0)
    rows[4] = replace(rows[4], backward_s=2 * rows[4].backward_s)
    fit = fit_rows(rows)
    assert fit.worst_row == "backward of 1024 over 1024"
    assert fit.worst_row in fit.rows_beyond(0.2) and fit.rows_beyond(0.9) == ()


def test_a_pack_is_named_by_its_lengths() -> None:
    pack = Chunk(tuple(Slice(i, 0, 3 + i, True) for i in range(3)), padding=4)
    row = ProfileRow.of(pack, 1.0, 2.0)
    assert (row.name, row.tokens, row.area) == ("3+4+5", 16, 9 + 16 + 25 + 16)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_rows_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} profile rows do not tell"):
        fit_rows(rows_of(0.0)[:count])


def test_rows_of_one_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="apart: measure at least three shapes"):
        fit_rows([rows_of(0.0)[0]] * 8)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_no_positive_numbers_are_refused(bad: float) -> None:
    rows = rows_of(0.0)
    rows[2] = replace(rows[2], forward_s=bad)
    with pytest.raises(ConfigError, match=r"256 over 1792: 256 tokens.*positive"):
        fit_rows(rows)


def _fit() -> LayerFit:
    return fit_rows(rows_of(0.0))


def test_a_calibrated_cluster_predicts_what_was_measured_and_scales_over_ranks() -> None:
    model, base = BUILTIN_MODELS["llama-7b"], load_cluster("a800-80g-1x8")
    cluster = calibrated_cluster(_fit(), model, base)
    found = analytic_coefficients(setup_of(model, make_layout(model, 1, 1), cluster, zero_stage=0))
    for name, value in TRUTH.items():
        assert getattr(found, name) == pytest.approx(value)
    chunk = Chunk((Slice(0, 4096, 4096, True),))
    row = rows_of(0.0)[7]
    assert (row.tokens, row.area) == (4096, CAUSAL.of_chunk(chunk))
    costs = CostModel(setup_of(model, make_layout(model, 1, 1), cluster, zero_stage=0)).chunk_costs(
        [chunk]
    )
    assert costs.backward_s[0, 0] == pytest.approx(model.num_layers * row.backward_s)
    assert cluster.all2all_bandwidth == base.all2all_bandwidth
    four = analytic_coefficients(setup_of(model, make_layout(model, 1, 4), cluster, zero_stage=0))
    assert four.linear_s == pytest.approx(TRUTH["linear_s"] / 4)


def test_a_term_that_did_not_show_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_forward_efficiency: its term did not show"):
        calibrated_cluster(
            replace(_fit(), attention_forward_s=0.0),
            BUILTIN_MODELS["llama-7b"],
            load_cluster("a800-80g-1x8"),
        )


@pytest.mark.parametrize(
    ("term", "name"),
    [
        ("linear_s", "linear_efficiency"),
        ("attention_forward_s", "attention_forward_efficiency"),
        ("attention_backward_s", "attention_backward_efficiency"),
    ],
)
def test_a_term_that_is_the_rounding_of_a_fit_did_not_show(term: str, name: str) -> None:
    """What is left of nothing by the solver's last bits is no efficiency."""
    model, base, fit = BUILTIN_MODELS["llama-7b"], load_cluster("a800-80g-1x8"), _fit()
    rounding = {"linear_s": 1e-26}.get(term, 1e-31)
    with pytest.raises(ConfigError, match=f"{name}: its term did not show"):
        calibrated_cluster(replace(fit, **{term: rounding}), model, base)
    little = 1e-4 * TRUTH[term]
    cluster = calibrated_cluster(replace(fit, **{term: little}), model, base)
    assert getattr(cluster, name) > 100 * getattr(calibrated_cluster(fit, model, base), name)


@given(st.integers(0, 2**32 - 1))
@examples(50)
def test_rows_without_attention_have_none_whatever_their_last_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def bare(row: ProfileRow) -> ProfileRow:
        forward = TRUTH["linear_s"] * row.tokens + TRUTH["overhead_forward_s"]
        backward = 2 * TRUTH["linear_s"] * row.tokens + TRUTH["overhead_backward_s"]
        seconds = [float(np.nextafter(s, rng.choice([0.0, s, 9.0]))) for s in (forward, backward)]
        return replace(row, forward_s=seconds[0], backward_s=seconds[1])

    rows = [bare(row) for row in rows_of(0.0)]
    fit = fit_rows([rows[i] for i in rng.permutation(len(rows))])
    with pytest.raises(ConfigError, match="attention_forward_efficiency: its term did not show"):
        calibrated_cluster(fit, BUILTIN_MODELS["llama-7b"], load_cluster("a800-80g-1x8"))


def test_slices_with_more_of_their_sequence_behind_them_are_told_from_the_last() -> None:
    names = [
        ProfileRow.of(Chunk((Slice(0, start, 8, is_tail),)), 1.0, 2.0).name
        for start, is_tail in ((0, True), (0, False), (16, False), (16, True))
    ]
    assert names == ["8", "8 over 0 (not last)", "8 over 16 (not last)", "8 over 16"]
