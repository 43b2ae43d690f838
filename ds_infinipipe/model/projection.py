"""Projections whose backward can leave the weight's gradient for later.

Between the two halves of a backward lie the projection's input and the gradient of its output; the
weight itself is needed by the first half only, so a sharded one is not gathered for the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EarlyGradient", "Projection", "WeightWork", "add_gradient"]


class Projection(nn.Linear):
    """`nn.Linear`; while `left` is a list, its backward puts the weight's part there."""

    left: list[WeightWork | EarlyGradient] | None = None

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Project.apply(x, self.weight, self.bias, self)
        return output


@dataclass(frozen=True, eq=False)
class WeightWork:
    """What the gradients of a projection's weight and bias are made of."""

    projection: Projection
    source: Tensor
    output_gradient: Tensor

    def take(self) -> None:
        """Add the gradients to those of the parameters."""
        weight, bias = self.projection.weight, self.projection.bias
        if weight.requires_grad:
            add_gradient(weight, _weight_gradient(self.source, self.output_gradient))
        if bias is not None and bias.requires_grad:
            add_gradient(bias, _bias_gradient(self.output_gradient))


@dataclass(frozen=True, eq=False)
class EarlyGradient:
    """The gradient of a parameter that had it with its input's, kept for the second half.

    Left in `.grad` it would meet those of other chunks there, in the parameter's precision.
    """

    parameter: nn.Parameter
    gradient: Tensor

    def take(self) -> None:
        """Add the gradient to that of the parameter."""
        add_gradient(self.parameter, self.gradient)


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad` as autograd does, of a parameter whose values may be elsewhere.

    A sharded parameter that is not gathered is an empty tensor, for which torch refuses a gradient;
    so while it gets one, it is a tensor of the right shape without memory.
    """
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
        return
    gradient = gradient.to(getattr(parameter, "grad_dtype", None) or gradient.dtype)
    values = parameter.data
    parameter.data = values.new_empty(()).expand(gradient.shape)
    parameter.grad = gradient
    parameter.data = values


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, projection: Projection
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.projection = projection
        # DeepSpeed's ZeRO-3 replaces F.linear, to save the weight as is done here
        return torch.ops.aten.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        projection: Projection = ctx.projection
        needs_source, needs_weight, needs_bias, _ = ctx.needs_input_grad
        source_gradient = gradient @ weight if needs_source else None
        if not (needs_weight or needs_bias):
            return source_gradient, None, None, None
        if projection.left is not None:
            # with its history the input would keep the rest of the layer's graph alive
            projection.left.append(WeightWork(projection, x.detach(), _compact(gradient)))
            return source_gradient, None, None, None
        return (
            source_gradient,
            _weight_gradient(x, gradient) if needs_weight else None,
            _bias_gradient(gradient) if needs_bias else None,
            None,
        )


def _weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def _bias_gradient(gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).sum(0)


def _compact(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where it would keep a larger one alive."""
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part else tensor
