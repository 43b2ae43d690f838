"""Output projection and cross-entropy in one, without ever holding all logits.

Two backends turn a block of logits into losses and, in place, into its gradient: a Triton kernel on
CUDA devices, torch operators over a few rows at a time elsewhere.

Shapes: T tokens, E hidden size, V vocabulary, B tokens of a block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.ops.triton_support import triton_obstacle
from ds_infinipipe.planner.predict.layer_bytes import LOSS_SCRATCH_ELEMENTS

__all__ = [
    "BACKENDS",
    "cross_entropy_",
    "linear_cross_entropy_sum",
    "linear_cross_entropy_sum_reference",
    "linear_cross_entropy_tokens",
    "resolve_cross_entropy",
]

logger = logging.getLogger(__name__)

_WIDE_BY_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}

RowLoss = Callable[[Tensor, Tensor, int, Tensor | None, float, bool], Tensor]


def cross_entropy_(
    logits_BV: Tensor,
    labels_B: Tensor,
    *,
    ignore_index: int = -100,
    token_weights_B: Tensor | None = None,
    grad_scale: float = 1.0,
    with_gradient: bool = True,
    impl: str = "auto",
) -> Tensor:
    """Each row's cross-entropy times its weight, [B]; the logits become the gradient.

    In `logits_BV` stands afterwards the gradient of `grad_scale` times the sum of the losses, in
    the logits' dtype; without a gradient they are used up and mean nothing. Rows may be apart
    (any row stride), elements not. Maxima, sums and losses are float32, float64 for float64 logits.
    A row whose label is `ignore_index` has loss and gradient 0. No other tensor of the logits' size
    is made. Megatron-LM's fused operator (paper, section IV) by another way: softmax and gradient
    in one kernel, in blocks of any vocabulary. Raises ConfigError for a backend that cannot run.
    """
    name = resolve_cross_entropy(impl, logits_BV.device, logits_BV.dtype)
    if logits_BV.stride(1) != 1 and logits_BV.shape[1] > 1:
        raise ConfigError("cross_entropy_ wants the logits of a row beside each other in memory")
    return BACKENDS[name](
        logits_BV, labels_B, ignore_index, token_weights_B, grad_scale, with_gradient
    )


def resolve_cross_entropy(impl: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that runs for `impl` here; "auto" is Triton's on CUDA devices, else torch's.

    Raises ConfigError for an unknown name and for one that cannot run.
    """
    return _resolve(impl, device.type, dtype)


@cache
def _resolve(impl: str, device_type: str, dtype: torch.dtype) -> str:
    if impl == "auto":
        name = "torch" if device_type == "cpu" or _obstacle("triton", device_type) else "triton"
        logger.info("cross-entropy on %s in %s: %s", device_type, dtype, name)
        return name
    if impl not in BACKENDS:
        raise ConfigError(
            f"cross-entropy backend {impl!r} is not known: use auto or one of {', '.join(BACKENDS)}"
        )
    obstacle = _obstacle(impl, device_type)
    if obstacle is not None:
        raise ConfigError(
            f"cross-entropy backend {impl!r} cannot run on {device_type}: {obstacle}; use auto"
        )
    logger.debug("cross-entropy on %s in %s: %s (asked for)", device_type, dtype, impl)
    return impl


def _obstacle(name: str, device_type: str) -> str | None:
    """Why a backend cannot run, or None."""
    return triton_obstacle(device_type) if name == "triton" else None


def linear_cross_entropy_sum(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    labels_T: Tensor,
    scale: float,
    block_tokens: int,
    ignore_index: int = -100,
    token_weights_T: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Sum over tokens of the cross-entropy of `hidden @ weight.T`, times `scale`; a scalar.

    With `token_weights_T` each token's loss is multiplied by its weight first.

    Both gradients are computed here, block by block, and kept until backward: that costs T * E and
    V * E elements (the latter in float32 for half-precision weights), while logits take
    `block_tokens` * V, in the inputs' dtype, for one block only (`planner.predict.layer_bytes`).
    Log-sum-exp and loss are float32, float64 for float64 inputs; the result has that dtype. Neither
    the weight nor the logits are saved, so the weight may be released after forward. Labels of
    `ignore_index` count nothing. `impl` is "auto" or one of BACKENDS; raises ConfigError when it
    cannot run.

    Deviation: the paper keeps each chunk's logits until its backward.
    """
    needs_grad = torch.is_grad_enabled() and (hidden_TE.requires_grad or weight_VE.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden_TE,
        weight_VE,
        labels_T,
        scale,
        block_tokens,
        ignore_index,
        needs_grad,
        token_weights_T,
        impl,
    )
    return loss


@torch.no_grad()
def linear_cross_entropy_tokens(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    labels_T: Tensor,
    block_tokens: int,
    ignore_index: int = -100,
    impl: str = "auto",
) -> Tensor:
    """Cross-entropy of each token of `hidden @ weight.T`, [T], 0 where the label is ignored.

    For evaluation: no gradients, and logits exist for `block_tokens` tokens at a time.
    """
    blocks = [
        cross_entropy_(
            hidden_TE[rows] @ weight_VE.T,
            labels_T[rows],
            ignore_index=ignore_index,
            with_gradient=False,
            impl=impl,
        )
        for rows in (slice(s, s + block_tokens) for s in range(0, len(labels_T), block_tokens))
    ]
    return torch.cat(blocks)


def linear_cross_entropy_sum_reference(
    hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, scale: float, ignore_index: int = -100
) -> Tensor:
    """What `linear_cross_entropy_sum` computes, by plain autograd with all logits in memory."""
    logits = (hidden_TE @ weight_VE.T).to(_WIDE_BY_DTYPE[hidden_TE.dtype])
    return scale * F.cross_entropy(logits, labels_T, ignore_index=ignore_index, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float,
        block_tokens: int,
        ignore_index: int,
        needs_grad: bool,
        token_weights: Tensor | None,
        impl: str,
    ) -> Tensor:
        wide = _WIDE_BY_DTYPE[hidden.dtype]
        total = hidden.new_zeros((), dtype=torch.float64)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        for start in range(0, hidden.shape[0], block_tokens):
            rows = slice(start, start + block_tokens)
            logits = hidden[rows] @ weight.T
            losses = cross_entropy_(
                logits,
                labels[rows],
                ignore_index=ignore_index,
                token_weights_B=None if token_weights is None else token_weights[rows],
                with_gradient=needs_grad,
                impl=impl,
            )
            total += losses.sum(dtype=torch.float64)
            if grad_hidden is not None and grad_weight is not None:
                torch.mm(logits, weight, out=grad_hidden[rows])
                _add_outer(grad_weight, logits, hidden[rows])
            del logits  # before the next block's are made
        ctx.grads, ctx.scale, ctx.weight_dtype = (grad_hidden, grad_weight), scale, weight.dtype
        return (total * scale).to(wide)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.grads
        if grad_hidden is None:
            raise RuntimeError("the loss was already differentiated; its gradients are gone")
        ctx.grads = None, None
        # The scale comes last: gradients of single tokens over a large batch's token count would
        # underflow in float16.
        factor = grad_loss * ctx.scale
        grad_hidden.mul_(factor)
        grad_weight = grad_weight.mul_(factor).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _add_outer(total_VE: Tensor, grad_logits_BV: Tensor, hidden_BE: Tensor) -> None:
    """total += grad_logits.T @ hidden, summed in the dtype of `total`."""
    if grad_logits_BV.dtype == total_VE.dtype:
        total_VE.addmm_(grad_logits_BV.T, hidden_BE)
    elif grad_logits_BV.device.type != "cpu":
        torch.addmm(total_VE, grad_logits_BV.T, hidden_BE, out_dtype=total_VE.dtype, out=total_VE)
    else:
        hidden_BE = hidden_BE.to(total_VE.dtype)
        width = max(1, LOSS_SCRATCH_ELEMENTS // len(hidden_BE))
        for columns, words in zip(
            grad_logits_BV.split(width, 1), total_VE.split(width), strict=True
        ):
            words.addmm_(columns.T.to(total_VE.dtype), hidden_BE)


def _torch_rows_(
    logits_BV: Tensor,
    labels_B: Tensor,
    ignore_index: int,
    token_weights_B: Tensor | None,
    grad_scale: float,
    with_gradient: bool,
) -> Tensor:
    """`cross_entropy_` in torch operators; narrow logits are widened a few rows at a time."""
    num_rows, vocab_size = logits_BV.shape
    wide = _WIDE_BY_DTYPE[logits_BV.dtype]
    losses_B = logits_BV.new_empty(num_rows, dtype=wide)
    step = num_rows if wide == logits_BV.dtype else max(1, LOSS_SCRATCH_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        logits = logits_BV[rows].to(wide)
        weights = None if token_weights_B is None else token_weights_B[rows, None].to(wide)
        losses_B[rows] = _wide_rows_(
            logits, labels_B[rows], ignore_index, weights, grad_scale, with_gradient
        )
        if with_gradient and wide != logits_BV.dtype:
            logits_BV[rows] = logits
        del logits  # before the next rows are widened
    return losses_B


def _wide_rows_(
    logits_BV: Tensor,
    labels_B: Tensor,
    ignore_index: int,
    weights_B1: Tensor | None,
    grad_scale: float,
    with_gradient: bool,
) -> Tensor:
    counts = (labels_B != ignore_index)[:, None]
    targets = labels_B[:, None].masked_fill(~counts, 0)
    logits_BV.sub_(logits_BV.amax(dim=-1, keepdim=True))
    target_logits = logits_BV.gather(1, targets)
    total = logits_BV.exp_().sum(dim=-1, keepdim=True)
    losses = (total.log() - target_logits).masked_fill_(~counts, 0.0)
    if weights_B1 is not None:
        losses.mul_(weights_B1)
    if with_gradient:
        logits_BV.div_(total).scatter_add_(1, targets, -torch.ones_like(total))
        factor = counts * grad_scale if weights_B1 is None else counts * weights_B1 * grad_scale
        logits_BV.mul_(factor)
    return losses[:, 0]


def _triton_rows_(*arguments: Any) -> Tensor:
    from ds_infinipipe.ops.triton_cross_entropy import triton_cross_entropy_

    return triton_cross_entropy_(*arguments)


BACKENDS: Mapping[str, RowLoss] = {"torch": _torch_rows_, "triton": _triton_rows_}
