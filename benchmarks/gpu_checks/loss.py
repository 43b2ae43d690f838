"""Cross-entropy: numerics, bandwidth against a copy, and peak memory against others' kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.ops.cross_entropy import (
    BACKENDS,
    cross_entropy_,
    linear_cross_entropy_sum,
    resolve_cross_entropy,
)
from gpu_checks.measure import Row, Sizes, seconds

__all__ = ["check_loss"]

_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check_loss(sizes: Sizes) -> Iterator[Row]:
    """Each backend that can run, over the vocabularies; then the head fused with the loss."""
    for vocab in sizes.vocab_sizes:
        for impl in BACKENDS:
            try:
                resolve_cross_entropy(impl, sizes.device, sizes.dtype)
            except ConfigError as error:
                yield Row("loss", f"{impl} {vocab}", None, "", note=str(error))
                continue
            yield _numerics(impl, vocab, sizes)
            yield from _bandwidth(impl, vocab, sizes)
        yield from _others(vocab, sizes)
        yield from _fused_heads(vocab, sizes)


def _data(vocab: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(sizes.loss_rows, vocab, device=sizes.device, dtype=sizes.dtype)
    labels = torch.randint(vocab, (sizes.loss_rows,), device=sizes.device)
    labels[::7] = -100
    return logits, labels


def _numerics(impl: str, vocab: int, sizes: Sizes) -> Row:
    logits, labels = _data(vocab, sizes)
    few = slice(0, 64)
    exact_in = logits[few].double().requires_grad_()
    exact = F.cross_entropy(exact_in, labels[few], reduction="none")
    (grad,) = torch.autograd.grad(exact.sum(), exact_in)
    exact = exact.detach()
    used = logits[few].clone()
    losses = cross_entropy_(used, labels[few], impl=impl)
    error = max(
        float((losses.double() - exact).abs().max() / exact.abs().max()),
        float((used.double() - grad).abs().max() / grad.abs().max()),
    )
    limit = _LIMITS[sizes.dtype]
    return Row("loss", f"{impl} {vocab} error", error, "", f"<= {limit:g}", error <= limit)


def _bandwidth(impl: str, vocab: int, sizes: Sizes) -> Iterator[Row]:
    """Two reads and a write of the logits, as a share of what a plain copy moves in a second."""
    logits, labels = _data(vocab, sizes)
    taken_s = seconds(lambda: cross_entropy_(logits, labels, impl=impl), sizes)
    rate = 3 * logits.nbytes / taken_s
    share, is_kernel = rate / _copy_rate(logits, sizes), impl == "triton"
    yield Row("loss", f"{impl} {vocab} rate", rate / 1e9, "GB/s")
    yield Row(
        "loss",
        f"{impl} {vocab} of copy",
        share,
        "",
        ">= 0.8" if is_kernel else "",
        share >= 0.8 if is_kernel else None,
    )
    more = _extra_bytes(lambda: cross_entropy_(logits, labels, impl=impl), sizes)
    if more is not None:
        share = more / logits.nbytes
        yield Row("loss", f"{impl} {vocab} temporary", share, "of logits", "<= 0.1", share <= 0.1)


def _copy_rate(tensor: Tensor, sizes: Sizes) -> float:
    """Bytes read and written in a second by a plain copy."""
    target = torch.empty_like(tensor)
    return 2 * tensor.nbytes / seconds(lambda: target.copy_(tensor), sizes)


def _others(vocab: int, sizes: Sizes) -> Iterator[Row]:
    """Time of torch's and Liger's cross-entropy, forward and backward, relative to ours."""
    logits, labels = _data(vocab, sizes)
    ours_s = seconds(lambda: cross_entropy_(logits, labels), sizes)
    leaf = logits.detach().requires_grad_()

    def plain() -> None:
        torch.autograd.grad(F.cross_entropy(leaf, labels, reduction="sum"), leaf)

    yield Row("loss", f"ours / torch {vocab}", ours_s / seconds(plain, sizes), "time")
    yield _beside_liger(vocab, logits, labels, ours_s, sizes)


def _beside_liger(vocab: int, logits: Tensor, labels: Tensor, ours_s: float, sizes: Sizes) -> Row:
    name = f"ours / Liger {vocab}"
    if sizes.device.type != "cuda":
        return Row("loss", name, None, "", note="Liger's kernels need a GPU")
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy
    except ImportError:
        return Row("loss", name, None, "", note="liger-kernel is not installed")

    def liger() -> None:
        # it writes the gradient over its input, so each call needs logits of its own
        own = logits.clone().requires_grad_()
        liger_cross_entropy(own, labels, reduction="sum").backward()

    liger_s = seconds(liger, sizes) - seconds(logits.clone, sizes)
    ratio = ours_s / max(liger_s, 1e-9)
    return Row("loss", name, ratio, "time", "<= 1", ratio <= 1.0)


def _fused_heads(vocab: int, sizes: Sizes) -> Iterator[Row]:
    """Output projection and loss in one: time and temporary bytes of each way, backward too."""
    hidden_size = int(sizes.model["hidden_size"])
    torch.manual_seed(0)
    hidden = torch.randn(sizes.loss_rows, hidden_size, device=sizes.device, dtype=sizes.dtype)
    weight = 0.02 * torch.randn(vocab, hidden_size, device=sizes.device, dtype=sizes.dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    labels = torch.randint(vocab, (sizes.loss_rows,), device=sizes.device)

    def ours() -> None:
        linear_cross_entropy_sum(hidden, weight, labels, 1.0, 1024).backward()

    def plain() -> None:
        F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum").backward()

    ways: list[tuple[str, Callable[[], None]]] = [("block-wise", ours), ("plain", plain)]
    if hasattr(F, "linear_cross_entropy"):

        def chunked() -> None:
            F.linear_cross_entropy(hidden, weight, labels, reduction="sum").backward()

        ways.append(("torch's linear", chunked))
    for name, function in ways:
        try:
            taken_s = seconds(function, sizes, 3)
        except (torch.OutOfMemoryError, TypeError, RuntimeError) as error:
            note = str(error).split("\n")[0][:120]
            yield Row("head", f"{name} {vocab}", None, "", note=note)
            continue
        yield Row("head", f"{name} {vocab}", taken_s * 1e3, "ms")
        more = _extra_bytes(function, sizes)
        if more is not None:
            yield Row("head", f"{name} {vocab} temporary", more / 2**20, "MiB")
        hidden.grad = weight.grad = None


def _extra_bytes(function: Callable[[], object], sizes: Sizes) -> int | None:
    """Peak bytes of a call beyond those before it; None where the device does not count."""
    if sizes.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
