"""Output projection and cross-entropy in one, without ever holding all logits.

Shapes: T tokens, E hidden size, V vocabulary, B tokens of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "linear_cross_entropy_sum",
    "linear_cross_entropy_sum_reference",
    "linear_cross_entropy_tokens",
]

_HALF = (torch.float16, torch.bfloat16)


def linear_cross_entropy_sum(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    labels_T: Tensor,
    scale: float,
    block_tokens: int,
    ignore_index: int = -100,
    token_weights_T: Tensor | None = None,
) -> Tensor:
    """Sum over tokens of the cross-entropy of `hidden @ weight.T`, times `scale`; a scalar.

    With `token_weights_T` each token's loss is multiplied by its weight first.

    Both gradients are computed here, block by block, and kept until backward: that costs T * E and
    V * E elements (the latter in float32 for half-precision weights), while logits take
    `block_tokens` * V for one block only. Log-sum-exp and loss are float32, float64 for float64
    inputs; the result has that dtype. Neither the weight nor the logits are saved, so the weight
    may be released after forward. Labels of `ignore_index` count nothing.

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
    )
    return loss


@torch.no_grad()
def linear_cross_entropy_tokens(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    labels_T: Tensor,
    block_tokens: int,
    ignore_index: int = -100,
) -> Tensor:
    """Cross-entropy of each token of `hidden @ weight.T`, [T], 0 where the label is ignored.

    For evaluation: no gradients, and logits exist for `block_tokens` tokens at a time.
    """
    exact = _exact_dtype(hidden_TE.dtype)
    blocks = [
        F.cross_entropy(
            (hidden_TE[rows] @ weight_VE.T).to(exact),
            labels_T[rows],
            ignore_index=ignore_index,
            reduction="none",
        )
        for rows in (slice(s, s + block_tokens) for s in range(0, len(labels_T), block_tokens))
    ]
    return torch.cat(blocks)


def linear_cross_entropy_sum_reference(
    hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, scale: float, ignore_index: int = -100
) -> Tensor:
    """What `linear_cross_entropy_sum` computes, by plain autograd with all logits in memory."""
    exact = _exact_dtype(hidden_TE.dtype)
    logits = (hidden_TE @ weight_VE.T).to(exact)
    return scale * F.cross_entropy(logits, labels_T, ignore_index=ignore_index, reduction="sum")


def _exact_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    ) -> Tensor:
        exact = _exact_dtype(hidden.dtype)
        total = hidden.new_zeros((), dtype=torch.float64)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_grad else None
        for start in range(0, hidden.shape[0], block_tokens):
            rows = slice(start, start + block_tokens)
            logits = (hidden[rows] @ weight.T).to(exact)
            weights = None if token_weights is None else token_weights[rows]
            total += _loss_to_grad(logits, labels[rows], ignore_index, weights)
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = logits.to(hidden.dtype)
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
                _add_outer(grad_weight, grad_logits, hidden[rows])
        ctx.grads, ctx.scale, ctx.weight_dtype = (grad_hidden, grad_weight), scale, weight.dtype
        return (total * scale).to(exact)

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
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _loss_to_grad(
    logits_BV: Tensor, labels_B: Tensor, ignore_index: int, token_weights_B: Tensor | None
) -> Tensor:
    """Sum of the block's losses; `logits_BV` is overwritten with its gradient, softmax - onehot,
    times the token's weight."""
    counts = (labels_B != ignore_index)[:, None]
    targets = labels_B[:, None].masked_fill(~counts, 0)
    logits_BV.sub_(logits_BV.amax(dim=-1, keepdim=True))
    target_logits = logits_BV.gather(1, targets)
    total = logits_BV.exp_().sum(dim=-1, keepdim=True)
    losses = (total.log() - target_logits).masked_fill_(~counts, 0.0)
    logits_BV.div_(total).scatter_add_(1, targets, -torch.ones_like(total))
    logits_BV.mul_(counts)
    if token_weights_B is not None:
        logits_BV.mul_(token_weights_B[:, None])
        losses.mul_(token_weights_B[:, None])
    return losses.sum(dtype=torch.float64)


def _add_outer(total_VE: Tensor, grad_logits_BV: Tensor, hidden_BE: Tensor) -> None:
    """total += grad_logits.T @ hidden, summed in the dtype of `total`."""
    if grad_logits_BV.dtype == total_VE.dtype:
        total_VE.addmm_(grad_logits_BV.T, hidden_BE)
    elif grad_logits_BV.is_cuda:
        total_VE += torch.mm(grad_logits_BV.T, hidden_BE, out_dtype=total_VE.dtype)
    else:
        total_VE.addmm_(grad_logits_BV.T.to(total_VE.dtype), hidden_BE.to(total_VE.dtype))
