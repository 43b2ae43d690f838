"""Latency and bandwidth of links come back from times, and into the cluster's fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.facts.links import all2all_s, gather_s
from ds_infinipipe.planner.predict.fit import Link, LinkRow, cluster_with_links, fit_links

SIZES = [4096 * 4**n for n in range(8)]


def rows_of(link: Link, latency_s: float, rate: float, noise: float = 0.0) -> list[LinkRow]:
    rng = np.random.default_rng(0)
    return [
        LinkRow(link, size, (latency_s + size / rate) * (1 + noise * rng.standard_normal()))
        for size in SIZES
    ]


def test_latency_and_bandwidth_come_back_under_noise() -> None:
    (fit,) = fit_links(rows_of(Link.HOP, 2e-5, 5e9)).values()
    assert (fit.latency_s, fit.bytes_per_s) == (pytest.approx(2e-5), pytest.approx(5e9))
    assert fit.worst_error < 1e-9
    (noisy,) = fit_links(rows_of(Link.HOP, 2e-5, 5e9, noise=0.03)).values()
    assert noisy.latency_s == pytest.approx(2e-5, rel=0.1)
    assert noisy.bytes_per_s == pytest.approx(5e9, rel=0.1)
    assert 0.005 < noisy.worst_error < 0.15


def test_each_link_has_its_own_fields_of_the_cluster_and_the_others_stay() -> None:
    base = load_cluster("h100-80g-2x8")
    inside = cluster_with_links(fit_links(rows_of(Link.HOP, 1e-5, 7e9)), base)
    assert inside == replace(
        base,
        device_p2p_bandwidth=pytest.approx(7e9),
        p2p_latency_s=pytest.approx(1e-5),
    )
    rows = rows_of(Link.HOP, 1e-5, 7e9) + rows_of(Link.NODE_HOP, 3e-5, 2e9)
    both = cluster_with_links(fit_links(rows), base)
    assert both.node_p2p_bandwidth == pytest.approx(2e9)
    assert both.p2p_latency_s == pytest.approx(3e-5)
    assert both.gather_bandwidth == base.gather_bandwidth
    assert cluster_with_links({}, base) is not base and cluster_with_links({}, base) == base


def test_the_cost_model_predicts_the_collectives_that_were_measured() -> None:
    """Eight ranks: a gather of `n` bytes in all took n / 2e9 s, a reduction n / 1e9 s."""
    rows = [
        LinkRow(link, size * 7 // 8, size / rate)
        for link, rate in ((Link.GATHER, 2e9), (Link.REDUCE, 1e9), (Link.ALL_TO_ALL, 4e9))
        for size in SIZES
    ]
    cluster = cluster_with_links(fit_links(rows), load_cluster("h100-80g-2x8"))
    # as many bytes gathered as reduced take what both took
    assert 2 * gather_s(2**20, 8, cluster) == pytest.approx(2**20 / 2e9 + 2**20 / 1e9)
    assert all2all_s(2**20, 8, cluster) == pytest.approx(2**20 / 4e9)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of(Link.HOP, 1e-5, 1e9)[:2], "hand-over inside a node: 2 rows of 2 sizes"),
        ([LinkRow(Link.GATHER, s, 0.0) for s in SIZES], "all-gather: .* from 0.0 to 0.0 s"),
        ([LinkRow(Link.REDUCE, s, 1e-3) for s in SIZES], None),
        ([LinkRow(Link.ALL_TO_ALL, s, 1.0 / s) for s in SIZES], "take no longer than 4 KiB"),
    ],
)
def test_times_that_tell_nothing_are_refused(rows: list[LinkRow], message: str | None) -> None:
    with pytest.raises(ConfigError, match=message or "take no longer"):
        fit_links(rows)


def moved_by_a_bit(rows: Sequence[LinkRow], seed: int) -> list[LinkRow]:
    """In another order, each time one unit in the last place up, down, or as it was."""
    rng = np.random.default_rng(seed)

    def moved(row: LinkRow) -> LinkRow:
        towards = (0.0, row.seconds, np.inf)[rng.integers(3)]
        return replace(row, seconds=float(np.nextafter(row.seconds, towards)))

    return [moved(rows[i]) for i in rng.permutation(len(rows))]


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 10.0))
@examples(200)
def test_equal_times_are_refused_whatever_their_last_bits(seed: int, seconds: float) -> None:
    rows = moved_by_a_bit([LinkRow(Link.REDUCE, size, seconds) for size in SIZES], seed)
    with pytest.raises(ConfigError, match="take no longer"):
        fit_links(rows)


@given(st.integers(0, 2**32 - 1))
@examples(50)
def test_a_fit_does_not_depend_on_the_last_bits(seed: int) -> None:
    rows = rows_of(Link.HOP, 2e-5, 5e9)
    (fit,), (other,) = fit_links(rows).values(), fit_links(moved_by_a_bit(rows, seed)).values()
    assert other.bytes_per_s == pytest.approx(fit.bytes_per_s, rel=1e-9)
    assert other.latency_s == pytest.approx(fit.latency_s, rel=1e-9)


def test_a_link_that_is_mostly_latency_keeps_its_bandwidth() -> None:
    """The longest transfer has a ten-thousandth of its time for bytes: not nothing."""
    rate = max(SIZES) / 1e-6
    (fit,) = fit_links(rows_of(Link.HOP, 1e-2, rate)).values()
    assert fit.bytes_per_s == pytest.approx(rate, rel=1e-3)
