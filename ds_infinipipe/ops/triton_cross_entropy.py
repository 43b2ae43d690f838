"""Cross-entropy of rows of logits on a GPU: one program per row, the gradient written over them.

Two passes over a row: the first finds its maximum and its sum of exponentials block by block, the
second turns every logit into its gradient. The row comes from memory once and from the cache the
second time; nothing else of its size is read or written.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["cross_entropy_kernel", "launch_sizes", "triton_cross_entropy_"]


@triton.jit  # type: ignore[untyped-decorator]
def cross_entropy_kernel(
    logits_ptr,
    row_stride,
    labels_ptr,
    weights_ptr,
    losses_ptr,
    vocab_size,
    ignore_index,
    grad_scale,
    HAS_WEIGHTS: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRADIENT:
            for start in range(0, vocab_size, BLOCK):
                places = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], dtype=logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + places, zeros, mask=places < vocab_size)
        return
    # read before the reductions below, at which all warps meet: behind them another warp may have
    # stored the gradient here already
    target = tl.load(logits_ptr + label).to(WIDE)
    highest = tl.full([], float("-inf"), dtype=WIDE)
    total = tl.full([], 0.0, dtype=WIDE)
    for start in range(0, vocab_size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocab_size
        logits = tl.load(logits_ptr + places, mask=inside, other=float("-inf")).to(WIDE)
        higher = tl.maximum(highest, tl.max(logits, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(logits - higher), axis=0)
        highest = higher
    weight = tl.full([], 1.0, dtype=WIDE)
    if HAS_WEIGHTS:
        weight = tl.load(weights_ptr + row).to(WIDE)
    tl.store(losses_ptr + row, (tl.log(total) - (target - highest)) * weight)
    if WITH_GRADIENT:
        factor = weight * grad_scale
        for start in range(0, vocab_size, BLOCK):
            places = start + tl.arange(0, BLOCK)
            inside = places < vocab_size
            logits = tl.load(logits_ptr + places, mask=inside, other=0.0).to(WIDE)
            gradient = tl.exp(logits - highest) / total
            gradient = tl.where(places == label, gradient - 1.0, gradient) * factor
            tl.store(logits_ptr + places, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def launch_sizes(vocab_size: int) -> tuple[int, int]:
    """(elements of a block, warps): 16 elements a thread for long rows."""
    block = min(8192, int(triton.next_power_of_2(vocab_size)))
    return block, min(16, max(1, block // 512))


def triton_cross_entropy_(
    logits_BV: Tensor,
    labels_B: Tensor,
    ignore_index: int,
    token_weights_B: Tensor | None,
    grad_scale: float,
    with_gradient: bool,
) -> Tensor:
    """The kernel behind `ops.cross_entropy.cross_entropy_`, which says what goes in and out."""
    num_rows, vocab_size = logits_BV.shape
    wide = torch.float64 if logits_BV.dtype == torch.float64 else torch.float32
    losses = torch.empty(num_rows, dtype=wide, device=logits_BV.device)
    block, num_warps = launch_sizes(vocab_size)
    cross_entropy_kernel[(num_rows,)](
        logits_BV,
        logits_BV.stride(0),
        labels_B,
        token_weights_B,
        losses,
        vocab_size,
        ignore_index,
        float(grad_scale),
        HAS_WEIGHTS=token_weights_B is not None,
        WITH_GRADIENT=with_gradient,
        WIDE=tl.float64 if wide == torch.float64 else tl.float32,
        BLOCK=block,
        num_warps=num_warps,
    )
    return losses
