"""How well the planner's time model fits one layer as measured on this device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_infinipipe.planner.predict.fit import fit_rows
from ds_infinipipe.profiling.layer import profile_layer
from gpu_checks.measure import Row, Sizes

__all__ = ["check_cost_model"]


def check_cost_model(sizes: Sizes, budget_s: float) -> Iterator[Row]:
    """Fit error of the rows; under 5 % on a quiet GPU."""
    dtype: torch.dtype = sizes.dtype
    rows = profile_layer(sizes.model, device=sizes.device, dtype=dtype, budget_s=budget_s)
    fit = fit_rows(rows)
    is_judged = not sizes.is_dry
    yield Row("cost model", "rows", float(len(rows)), "")
    for name, error in (("median error", fit.median_error), ("worst error", fit.worst_error)):
        is_target = is_judged and name == "median error"
        yield Row(
            "cost model",
            name,
            error,
            "",
            "<= 0.05" if is_target else "",
            error <= 0.05 if is_target else None,
        )
