"""Latency and bandwidth of links come back from times, and into the cluster's fields."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.clusters import load_cluster
from ds_infinipipe.planner.link_fit import Link, LinkRow, cluster_with_links, fit_links
from ds_infinipipe.planner.links import all2all_s, gather_s

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
