"""Attention over packed segments on the CPU, in memory that grows with tokens, not their square.

torch's CPU flash kernel knows a causal mask only for as many queries as keys. So a segment with
context runs in parts: over its context without a mask, over its own keys with a causal one, and the
results are merged by their log-sum-exps. With a sliding window queries go in blocks no longer than
it; the oldest keys of a block, which each query sees one less of, are a causal mask read backwards.

Shapes: T query tokens, S key tokens, H heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["cpu_flash_attention"]

Ranges = Sequence[tuple[slice, slice]]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries and keys that one kernel call sees, rows of the packed tensors."""

    queries: slice
    keys: slice
    is_causal: bool
    is_flipped: bool = False
    """Both are read backwards, so that "causal" hides the oldest keys from the last queries."""


def _blocks(rows_q: slice, rows_k: slice, window: int | None) -> Iterator[tuple[_Part, ...]]:
    """The parts of each block of a segment's queries, its own keys first."""
    shift, first_key, end_key = rows_q.stop - rows_k.stop, rows_k.start, rows_k.stop
    span = end_key - first_key if window is None else window
    start = rows_q.start - shift
    while start < end_key:
        sees_all = start < first_key + span
        end = min(first_key + span if sees_all else start + span, end_key)
        queries, length = slice(start + shift, end + shift), end - start
        parts = [_Part(queries, slice(start, end), True)]
        full = slice(first_key if sees_all else end - span, start)
        if full.start < full.stop:
            parts.append(_Part(queries, full, False))
        if not sees_all and length > 1:
            # the block's last query sees none of these keys, the first all of them
            older = slice(start - span + 1, end - span)
            fewer = slice(queries.start, queries.stop - 1)
            parts.append(_Part(fewer, older, True, is_flipped=True))
        yield tuple(parts)
        start = end


def cpu_flash_attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    ranges: Ranges,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Bottom-right causal attention of each (query range, key range); returns [T, H, D].

    Ranges are consecutive and cover all queries and keys. With `window` a query sees that many
    keys, its own among them. float16, bfloat16, float32 and float64.
    """
    out: Tensor = _CpuFlash.apply(q_THD, k_SKD, v_SKD, ranges, scale, window)
    return out


class _CpuFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        stat_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse_TH = torch.empty(q.shape[:2], dtype=stat_dtype)
        for rows_q, rows_k in ranges:
            for parts in _blocks(rows_q, rows_k, window):
                rows = parts[0].queries
                out[rows], lse_TH[rows] = _block_forward(q, k, v, parts, scale)
        ctx.save_for_backward(q, k, v, out, lse_TH)
        ctx.ranges, ctx.scale, ctx.window = ranges, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Every part's kernel gets the merged O and log-sum-exp.

        With those, its probabilities exp(score - lse) and row sums of dO * O are the whole row's,
        so the parts' gradients just add up.
        """
        q, k, v, out, lse_TH = ctx.saved_tensors
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        for rows_q, rows_k in ctx.ranges:
            for parts in _blocks(rows_q, rows_k, ctx.window):
                for part in parts:
                    _add_gradients(grads, (grad_out, q, out, lse_TH), (k, v), part, ctx.scale)
        return grads[0], grads[1], grads[2], None, None, None


def _block_forward(
    q: Tensor, k: Tensor, v: Tensor, parts: tuple[_Part, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H] of a block of queries."""
    out, lse = own_out, own_lse = _kernel(q, k, v, parts[0], scale)
    if len(parts) == 1:
        return out, lse
    others = [_kernel(q, k, v, part, scale) for part in parts[1:]]
    lse = own_lse.clone()
    for _, part_lse in others:
        lse[: len(part_lse)] = torch.logaddexp(lse[: len(part_lse)], part_lse)
    out = own_out * (own_lse - lse).exp_()[..., None]
    for part_out, part_lse in others:
        share = (part_lse - lse[: len(part_lse)]).exp_()
        out[: len(part_lse)] += part_out * share[..., None]
    return out, lse


def _kernel(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _forward(
        *(_heads_first(t, part) for t in (q[part.queries], k[part.keys], v[part.keys])),
        dropout_p=0.0,
        is_causal=part.is_causal,
        scale=scale,
    )
    return _tokens_first(out, part), _tokens_first(lse, part)


def _add_gradients(
    grads: Sequence[Tensor],
    queries: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    part: _Part,
    scale: float,
) -> None:
    """Add a part's dQ, dK, dV to `grads`; `queries` are dO, Q, O and the log-sum-exp."""
    grad_out, q, out, lse = (_heads_first(t[part.queries], part) for t in queries)
    k, v = (_heads_first(t[part.keys], part) for t in keys)
    found = _backward(
        *(grad_out, q, k, v, out, lse), dropout_p=0.0, is_causal=part.is_causal, scale=scale
    )
    for total, rows, grad in zip(grads, (part.queries, part.keys, part.keys), found, strict=True):
        total[rows] += _tokens_first(grad, part)


def _heads_first(x: Tensor, part: _Part) -> Tensor:
    return (x.flip(0) if part.is_flipped else x).transpose(0, 1)[None]


def _tokens_first(x: Tensor, part: _Part) -> Tensor:
    x = x[0].transpose(0, 1)
    return x.flip(0) if part.is_flipped else x
