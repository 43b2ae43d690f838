"""Fit latency and bandwidth of a cluster's links to measured transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from scipy.optimize import nnls

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.clusters import ClusterSpec

__all__ = ["Link", "LinkFit", "LinkRow", "cluster_with_links", "fit_links"]

_LEAST_ROWS = 3


class Link(Enum):
    """What was transferred, and by which way."""

    HOP = "hand-over inside a node"
    NODE_HOP = "hand-over between nodes"
    GATHER = "all-gather"
    REDUCE = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Seconds in which `num_bytes` crossed a link.

    The bytes are what `planner.links` divides by the bandwidth: of a hand-over its message, between
    nodes those of all devices of the node together; of a collective the share (n - 1) / n of what
    it gathers or reduces, or of what each rank sends.
    """

    link: Link
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """seconds = latency_s + bytes / bytes_per_s; `worst_error` is of predicted / measured - 1."""

    link: Link
    latency_s: float
    bytes_per_s: float
    worst_error: float


def fit_links(rows: Sequence[LinkRow]) -> dict[Link, LinkFit]:
    """Least squares of relative errors, latency at least 0, of each link that has rows.

    Raises ConfigError for fewer than three sizes, times that are not positive numbers, and times
    that do not grow with the bytes.
    """
    return {
        link: _fit([row for row in rows if row.link is link])
        for link in Link
        if any(row.link is link for row in rows)
    }


def _fit(rows: Sequence[LinkRow]) -> LinkFit:
    name, seconds = rows[0].link.value, np.array([row.seconds for row in rows])
    num_bytes = np.array([float(row.num_bytes) for row in rows])
    if not (np.isfinite(seconds) & (seconds > 0)).all() or len(set(num_bytes)) < _LEAST_ROWS:
        raise ConfigError(
            f"{name}: {len(rows)} rows of {len(set(num_bytes))} sizes with times from "
            f"{seconds.min()} to {seconds.max()} s; at least {_LEAST_ROWS} sizes with positive "
            "times are needed: give more time"
        )
    weighted = np.stack([1.0 / seconds, num_bytes / seconds], axis=1)
    scale = np.linalg.norm(weighted, axis=0)
    latency_s, byte_s = nnls(weighted / scale, np.ones(len(rows)))[0] / scale
    if byte_s <= 0:
        raise ConfigError(
            f"{name}: {num_bytes.max() / 2**20:.3g} MiB take no longer than "
            f"{num_bytes.min() / 2**10:.3g} KiB; give more time, or a quieter machine"
        )
    errors = weighted @ np.array([latency_s, byte_s]) - 1.0
    return LinkFit(rows[0].link, float(latency_s), float(1.0 / byte_s), float(np.abs(errors).max()))


def cluster_with_links(fits: dict[Link, LinkFit], base: ClusterSpec) -> ClusterSpec:
    """`base` with what was measured; what was not stays.

    Gathers and reduces share one bandwidth in the cost model: here the one at which as many bytes
    of each take as long as measured. Its one latency of hand-overs is the larger of the two.
    """
    changes: dict[str, float] = {}
    sides = [fits[link] for link in (Link.GATHER, Link.REDUCE) if link in fits]
    if sides:
        changes["gather_bandwidth"] = len(sides) / sum(1.0 / fit.bytes_per_s for fit in sides)
    if Link.ALL_TO_ALL in fits:
        changes["all2all_bandwidth"] = fits[Link.ALL_TO_ALL].bytes_per_s
        changes["collective_latency_s"] = fits[Link.ALL_TO_ALL].latency_s
    if Link.HOP in fits:
        changes["device_p2p_bandwidth"] = fits[Link.HOP].bytes_per_s
    if Link.NODE_HOP in fits:
        changes["node_p2p_bandwidth"] = fits[Link.NODE_HOP].bytes_per_s
    hops = [fits[link].latency_s for link in (Link.HOP, Link.NODE_HOP) if link in fits]
    if hops:
        changes["p2p_latency_s"] = max(hops)
    return replace(base, **changes)  # type: ignore[arg-type]
