"""Attention over packed segments on the CPU, in memory that grows with tokens, not their square.

torch's CPU flash kernel knows a causal mask only for as many queries as keys. So a segment with
context runs twice, over its context (no mask) and over its own keys (causal), and the two results
are merged by their log-sum-exp.

Shapes: T query tokens, S key tokens, H heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["cpu_flash_attention"]

Ranges = Sequence[tuple[slice, slice]]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cpu_flash_attention(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, ranges: Ranges, scale: float
) -> Tensor:
    """Bottom-right causal attention of each (query range, key range); returns [T, H, D].

    Ranges are consecutive and cover all queries and keys. float16, bfloat16, float32 and float64.
    """
    out: Tensor = _CpuFlash.apply(q_THD, k_SKD, v_SKD, ranges, scale)
    return out


class _CpuFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranges: Ranges, scale: float) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        stat_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse_TH = torch.empty(q.shape[:2], dtype=stat_dtype)
        for rows_q, rows_k in ranges:
            segment_out, segment_lse = _segment_forward(q[rows_q], k[rows_k], v[rows_k], scale)
            out[rows_q] = segment_out
            lse_TH[rows_q] = segment_lse
        ctx.save_for_backward(q, k, v, out, lse_TH)
        ctx.ranges, ctx.scale = ranges, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse_TH = ctx.saved_tensors
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        for rows_q, rows_k in ctx.ranges:
            _segment_backward(
                [grad[rows] for grad, rows in zip(grads, (rows_q, rows_k, rows_k), strict=True)],
                (grad_out[rows_q], q[rows_q], out[rows_q], lse_TH[rows_q]),
                (k[rows_k], v[rows_k]),
                ctx.scale,
            )
        return grads[0], grads[1], grads[2], None, None


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _tokens_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def _segment_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H] of one segment."""
    context = k.shape[0] - q.shape[0]
    own_out, own_lse = _kernel(q, k[context:], v[context:], scale, is_causal=True)
    if context == 0:
        return own_out, own_lse
    context_out, context_lse = _kernel(q, k[:context], v[:context], scale, is_causal=False)
    lse = torch.logaddexp(own_lse, context_lse)
    own_share = (own_lse - lse).exp_()[..., None]
    context_share = (context_lse - lse).exp_()[..., None]
    return own_out * own_share + context_out * context_share, lse


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse = _forward(
        *(_heads_first(t) for t in (q, k, v)), dropout_p=0.0, is_causal=is_causal, scale=scale
    )
    return _tokens_first(out), _tokens_first(lse)


def _segment_backward(
    grads: Sequence[Tensor],
    queries: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    scale: float,
) -> None:
    """Write dQ, dK, dV of one segment; `queries` are dO, Q, O and the log-sum-exp.

    Both parts' kernels get the merged O and log-sum-exp. With those, their probabilities
    exp(score - lse) and row sums of dO * O are the whole row's, so the parts' dQ just add up.
    """
    grad_q, grad_k, grad_v = grads
    k, v = keys
    context = k.shape[0] - grad_q.shape[0]
    own = _kernel_backward(queries, (k[context:], v[context:]), scale, is_causal=True)
    grad_k[context:], grad_v[context:] = own[1:]
    if context == 0:
        grad_q[:] = own[0]
        return
    earlier = _kernel_backward(queries, (k[:context], v[:context]), scale, is_causal=False)
    grad_k[:context], grad_v[:context] = earlier[1:]
    torch.add(own[0], earlier[0], out=grad_q)


def _kernel_backward(
    queries: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, q, out, lse = (_heads_first(t) for t in queries)
    k, v = (_heads_first(t) for t in keys)
    grads = _backward(
        *(grad_out, q, k, v, out, lse), dropout_p=0.0, is_causal=is_causal, scale=scale
    )
    grad_q, grad_k, grad_v = (_tokens_first(g) for g in grads)
    return grad_q, grad_k, grad_v
