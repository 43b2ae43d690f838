"""Fit the cost model to measurements: of one decoder layer (Eq. 1-2), and of a cluster's links.

The fit is turned into a ClusterSpec, so that what was measured with one model and layout serves the
others: efficiencies belong to the hardware, the FLOPs to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.clusters import ClusterSpec
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.predict.area import CAUSAL, AttentionArea, chunk_sizes
from ds_infinipipe.planner.predict.time import attention_backward_flops

__all__ = [
    "LayerFit",
    "Link",
    "LinkFit",
    "LinkRow",
    "ProfileRow",
    "calibrated_cluster",
    "cluster_with_links",
    "fit_links",
    "fit_rows",
]

Floats = NDArray[np.float64]
_TERMS = (
    "linear_s",
    "attention_forward_s",
    "attention_backward_s",
    "overhead_forward_s",
    "overhead_backward_s",
)
_LEAST_SHARE = 1e-6  # of a measured time; a least-squares fit is no more exact
_LEAST_ROWS = 3


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Seconds of one decoder layer, alone on a rank, for a chunk of `tokens` and `area`.

    `area` is the quadratic term of Eq. 1, (C + s0)^2 - C^2 + sum of s^2, padding included.
    """

    name: str
    tokens: int
    area: int
    forward_s: float
    backward_s: float

    @classmethod
    def of(
        cls, chunk: Chunk, forward_s: float, backward_s: float, area_of: AttentionArea = CAUSAL
    ) -> ProfileRow:
        """The row of a measured chunk, named by its shape; `area_of` knows the layer's window."""
        context, pieces = chunk.context_len, [s.length for s in chunk.slices]
        name = f"{pieces[0]} over {context}" if context else "+".join(map(str, pieces))
        if not chunk.slices[0].is_tail:
            name = f"{pieces[0]} over {context} (not last)"
        ((tokens,), (area,)) = chunk_sizes([chunk], area_of)
        return cls(name, int(tokens), int(area), forward_s, backward_s)


@dataclass(frozen=True)
class LayerFit:
    """Coefficients of one layer on one rank, in the sense of CostCoefficients, and their errors.

    `errors` holds predicted / measured - 1 of every row, forwards first, then backwards.
    """

    linear_s: float
    attention_forward_s: float
    attention_backward_s: float
    overhead_forward_s: float
    overhead_backward_s: float
    rows: tuple[ProfileRow, ...]
    errors: tuple[float, ...]

    def largest_share(self, term: str) -> float:
        """Of any measured time, what the coefficient of this name accounts for."""
        design, measured = _equations(self.rows)
        most = float((design[:, _TERMS.index(term)] / measured).max())
        return most * float(getattr(self, term))

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        return float(np.max(np.abs(self.errors)))

    @property
    def worst_row(self) -> str:
        """Pass and shape of the row that is predicted worst."""
        return self._name(int(np.argmax(np.abs(self.errors))))

    def rows_beyond(self, error: float) -> tuple[str, ...]:
        """Passes and shapes whose relative error is larger than `error`."""
        return tuple(self._name(i) for i, e in enumerate(self.errors) if abs(e) > error)

    def _name(self, place: int) -> str:
        which = "forward" if place < len(self.rows) else "backward"
        return f"{which} of {self.rows[place % len(self.rows)].name}"


def fit_rows(rows: Sequence[ProfileRow]) -> LayerFit:
    """Least squares of relative errors, no coefficient below 0.

    Forward: linear * tokens + attention_forward * area + overhead_forward; backward: the linear
    term twice (Eq. 2) and coefficients of its own. Raises ConfigError for times that are no
    positive numbers and for rows that do not tell the terms apart.
    """
    for row in rows:
        times = (row.forward_s, row.backward_s)
        if not all(np.isfinite(t) and t > 0 for t in times) or row.tokens < 1 or row.area < 1:
            raise ConfigError(
                f"profile row {row.name}: {row.tokens} tokens, area {row.area}, forward "
                f"{row.forward_s} s, backward {row.backward_s} s; all must be positive numbers"
            )
    design, measured = _equations(rows)
    weighted = design / measured[:, None]
    scale = np.linalg.norm(weighted, axis=0) if len(rows) else np.zeros(len(_TERMS))
    if len(rows) < 3 or (scale == 0).any() or np.linalg.matrix_rank(weighted / scale, 1e-6) < 5:
        raise ConfigError(
            f"{len(rows)} profile rows do not tell linear, quadratic and fixed costs apart: "
            "measure at least three shapes whose tokens and contexts vary independently"
        )
    solution = nnls(weighted / scale, np.ones(len(measured)))[0] / scale
    errors = weighted @ solution - 1.0
    values = dict(zip(_TERMS, solution.tolist(), strict=True))
    return LayerFit(**values, rows=tuple(rows), errors=tuple(errors.tolist()))


def calibrated_cluster(fit: LayerFit, model: ModelSpec, base: ClusterSpec) -> ClusterSpec:
    """`base` with the measured efficiencies and overheads; its links stay as they are.

    `model` is the one whose layer was measured, heads as on a single rank. Raises ConfigError when
    a term did not show in the measurements, as its efficiency would be infinite.
    """
    forward = 2.0 * model.query_size
    backward = attention_backward_flops(forward)

    def efficiency(name: str, flops: float, term: str) -> float:
        if fit.largest_share(term) <= _LEAST_SHARE:
            raise ConfigError(
                f"{name}: its term did not show in the measured times; measure longer contexts "
                "or more tokens, or give more time"
            )
        return flops / (base.peak_flops * float(getattr(fit, term)))

    return replace(
        base,
        linear_efficiency=efficiency("linear_efficiency", 2.0 * model.layer_params, "linear_s"),
        attention_forward_efficiency=efficiency(
            "attention_forward_efficiency", forward, "attention_forward_s"
        ),
        attention_backward_efficiency=efficiency(
            "attention_backward_efficiency", backward, "attention_backward_s"
        ),
        layer_overhead_forward_s=fit.overhead_forward_s,
        layer_overhead_backward_s=fit.overhead_backward_s,
    )


def _equations(rows: Sequence[ProfileRow]) -> tuple[Floats, Floats]:
    """Matrix [2 n, 5] over the terms and measured seconds [2 n], forwards first."""
    forward = [[r.tokens, r.area, 0.0, 1.0, 0.0] for r in rows]
    backward = [[2.0 * r.tokens, 0.0, r.area, 0.0, 1.0] for r in rows]
    measured = [r.forward_s for r in rows] + [r.backward_s for r in rows]
    design = np.array(forward + backward, dtype=np.float64).reshape(-1, len(_TERMS))
    return design, np.array(measured, dtype=np.float64)


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

    The bytes are what `planner.facts.links` divides by the bandwidth: of a hand-over its message,
    between nodes those of all devices of the node together; of a collective the share (n - 1) / n
    of what it gathers or reduces, or of what each rank sends.
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
    most_s = byte_s * num_bytes.max()
    if most_s <= _LEAST_SHARE * (latency_s + most_s):
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
