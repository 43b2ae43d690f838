"""The attention ladder: every backend that can run here, against float64, and its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.ops.attention import (
    IMPLEMENTATIONS,
    Segments,
    check_alignment,
    resolve_attention,
    varlen_attention,
)
from gpu_checks.measure import Row, Sizes, seconds

__all__ = ["check_attention"]

# a hybrid chunk in small: a slice over its context, shorts of odd lengths, one of one token
_SMALL = Segments((0, 70, 107, 108), (0, 303, 340, 341))
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check_attention(sizes: Sizes) -> Iterator[Row]:
    """Alignment, numerics and speed; a backend that cannot run gives one row that says why."""
    for impl in IMPLEMENTATIONS:
        if impl == "naive":
            continue
        try:
            resolve_attention(impl, sizes.device, sizes.dtype)
        except ConfigError as error:
            yield Row("attention", f"{impl}", None, "", note=str(error))
            continue
        yield _alignment(impl, sizes)
        yield _numerics(impl, sizes)
        yield from _speed(impl, sizes)
    chosen = resolve_attention("auto", sizes.device, sizes.dtype)
    yield Row("attention", f"auto takes {chosen}", None, "")


def _alignment(impl: str, sizes: Sizes) -> Row:
    try:
        check_alignment(sizes.device, sizes.dtype, impl)
    except ConfigError as error:
        return Row("attention", f"{impl} alignment", 0.0, "", "right", False, str(error))
    return Row("attention", f"{impl} alignment", 1.0, "", "right", True)


def _numerics(impl: str, sizes: Sizes) -> Row:
    """Largest error of output and gradients, relative to the largest entry of each."""
    inputs = _inputs(sizes, _SMALL.num_q, _SMALL.num_k)
    grad_out = torch.randn_like(inputs[0])
    found = _run(impl, inputs, grad_out, _SMALL)
    exact = _run("naive", [t.double() for t in inputs], grad_out.double(), _SMALL)
    error = max(
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, exact, strict=True)
    )
    limit = _LIMITS[sizes.dtype]
    return Row("attention", f"{impl} error", error, "", f"<= {limit:g}", error <= limit)


def _speed(impl: str, sizes: Sizes) -> Iterator[Row]:
    """FLOP rate, forward and backward: causal pairs only, backward 2.5 times the forward."""
    heads, _, head_dim = sizes.heads
    for new, context in sizes.attention_grid:
        segments = Segments((0, new), (0, context + new))
        inputs = _inputs(sizes, new, context + new)
        for tensor in inputs:
            tensor.requires_grad_()
        grad_out = torch.randn_like(inputs[0])
        try:
            forward_s = seconds(_forward(impl, inputs, segments), sizes)
            both_s = seconds(_both(impl, inputs, grad_out, segments), sizes)
        except torch.OutOfMemoryError as error:
            note = str(error).split("\n")[0]
            yield Row("attention", f"{impl} {new} over {context}", None, "", note=note)
            continue
        flops = 4.0 * heads * head_dim * (new * context + new * (new + 1) / 2)
        name = f"{impl} {new} over {context}"
        backward_s = max(both_s - forward_s, 1e-9)
        yield Row("attention", f"{name} forward", flops / forward_s / 1e12, "TFLOP/s")
        yield Row("attention", f"{name} backward", 2.5 * flops / backward_s / 1e12, "TFLOP/s")


def _inputs(sizes: Sizes, num_q: int, num_k: int) -> list[Tensor]:
    generator = torch.Generator(sizes.device).manual_seed(0)
    heads, kv_heads, head_dim = sizes.heads
    shapes = ((num_q, heads), (num_k, kv_heads), (num_k, kv_heads))
    return [
        torch.randn(
            tokens, count, head_dim, device=sizes.device, dtype=sizes.dtype, generator=generator
        )
        for tokens, count in shapes
    ]


def _forward(impl: str, inputs: list[Tensor], segments: Segments) -> Callable[[], None]:
    scale = inputs[0].shape[-1] ** -0.5

    def forward() -> None:
        varlen_attention(*inputs, segments, scale, impl=impl)

    return forward


def _both(
    impl: str, inputs: list[Tensor], grad_out: Tensor, segments: Segments
) -> Callable[[], None]:
    scale = inputs[0].shape[-1] ** -0.5

    def both() -> None:
        out = varlen_attention(*inputs, segments, scale, impl=impl)
        torch.autograd.grad(out, inputs, grad_out)

    return both


def _run(impl: str, inputs: list[Tensor], grad_out: Tensor, segments: Segments) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = varlen_attention(*leaves, segments, leaves[0].shape[-1] ** -0.5, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
