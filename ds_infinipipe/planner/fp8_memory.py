"""Bytes that FP8 projections need while they run, told to the planner without loading torch.

Both operands of a product are rounded copies of a byte an element; of one at a time a few rows are
in float32 (ops/fp8.py). Nothing of it outlives the product. A layer's other tensors are counted by
MemoryModel, so each figure here is of the moment of a product, for T tokens of a rank.
"""

from __future__ import annotations

from ds_infinipipe.planner.specs import ModelSpec

__all__ = [
    "SCRATCH_ELEMENTS",
    "forward_bytes",
    "input_gradient_bytes",
    "product_bytes",
    "ungraphed_bytes",
]

SCRATCH_ELEMENTS = 2**24
"""Most elements of an operand in float32 at a time: 64 MiB, as many small kernels take long."""


def product_bytes(rows: int, columns: int, inner: int, dtype_bytes: int) -> int:
    """Of a product [rows, inner] x [inner, columns]: rounded operands, scratch, the result."""
    most = max(1, SCRATCH_ELEMENTS // inner)
    first, second = (4 * inner * min(most, count) for count in (rows, columns))
    result = dtype_bytes * rows * columns
    return rows * inner + max(first, columns * inner + max(second, result))


def forward_bytes(model: ModelSpec, tokens: int) -> int:
    """Of the down projection, when all that the layer keeps is there but for its output.

    Plain layers keep a wider copy of the residual, which is there as well.
    """
    product = product_bytes(tokens, model.hidden_size, model.ffn_size, model.dtype_bytes)
    return product + (0 if model.fused_kernels else model.dtype_bytes * tokens * model.hidden_size)


def ungraphed_bytes(model: ModelSpec, tokens: int) -> int:
    """Most beside the input of a layer without a graph: in its up or its down projection.

    Residual, norm output and activated gate at the former; residual and product at the latter.
    """
    hidden, ffn, size = model.hidden_size, model.ffn_size, model.dtype_bytes
    up = size * tokens * (2 * hidden + ffn) + product_bytes(tokens, ffn, hidden, size)
    down = product_bytes(tokens, hidden, ffn, size)
    return max(up, size * tokens * (hidden + ffn) + down)


def input_gradient_bytes(model: ModelSpec, tokens: int) -> tuple[int, int]:
    """Of the input gradients in the MLP on top of what the layer keeps: down's, then up's.

    At the latter those of gate and up are there, in place of what these were, and the product is
    gone.
    """
    hidden, ffn, size = model.hidden_size, model.ffn_size, model.dtype_bytes
    down = product_bytes(tokens, ffn, hidden, size)
    return down, product_bytes(tokens, hidden, ffn, size) - size * tokens * ffn
