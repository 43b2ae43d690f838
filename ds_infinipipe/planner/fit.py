"""Fit the cost model's coefficients to measured times of one decoder layer (Eq. 1-2).

The fit is turned into a ClusterSpec, so that what was measured with one model and layout serves the
others: efficiencies belong to the hardware, the FLOPs to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.attention_area import CAUSAL, AttentionArea, chunk_sizes
from ds_infinipipe.planner.clusters import ClusterSpec
from ds_infinipipe.planner.costs import attention_backward_flops
from ds_infinipipe.planner.specs import ModelSpec
from ds_infinipipe.planner.types import Chunk

__all__ = ["LayerFit", "ProfileRow", "calibrated_cluster", "fit_rows"]

Floats = NDArray[np.float64]

_TERMS = (
    "linear_s",
    "attention_forward_s",
    "attention_backward_s",
    "overhead_forward_s",
    "overhead_backward_s",
)


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

    def efficiency(name: str, flops: float, taken_s: float) -> float:
        if taken_s <= 0:
            raise ConfigError(
                f"{name}: its term did not show in the measured times; measure longer contexts "
                "or more tokens, or give more time"
            )
        return flops / (base.peak_flops * taken_s)

    return replace(
        base,
        linear_efficiency=efficiency("linear_efficiency", 2.0 * model.layer_params, fit.linear_s),
        attention_forward_efficiency=efficiency(
            "attention_forward_efficiency", forward, fit.attention_forward_s
        ),
        attention_backward_efficiency=efficiency(
            "attention_backward_efficiency", backward, fit.attention_backward_s
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
