"""The square of a gradient's norm: what clipping needs, and whether all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

__all__ = ["squared_norm"]

_BLOCK = 1 << 22


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Sum of the squares of all elements; not finite where an element is not. Waits for the device.

    One pass in the tensors' own precision; blocks are added up in double precision, so that
    rounding does not grow with the size of a tensor.
    """
    blocks = [block for t in tensors for block in t.detach().view(-1).split(_BLOCK)]
    total = _sum_of_squares(blocks)
    if math.isfinite(total):
        return total
    # squares of finite float32 above 1.8e19 are not finite
    return _sum_of_squares(blocks, torch.float64)


def _sum_of_squares(blocks: list[torch.Tensor], dtype: torch.dtype | None = None) -> float:
    if not blocks:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(block, dtype=dtype) for block in blocks])
    return float(norms.double().square().sum())
