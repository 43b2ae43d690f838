"""Projections in 8-bit floating point: operands rounded with a scale of their own, sums in float32.

The output and the input's gradient are FP8 products; the weight's gradient stays in the training
dtype. Its products run over tokens, whose number is any while FP8 units want multiples of 16, and
it is what low precision hurts most. Nothing FP8 is kept: activations between layers and stages,
weights and their gradients have the training dtype.

Shapes: M rows, N columns of a product, K what it sums over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.predict.layer_bytes import FP8_SCRATCH_ELEMENTS

__all__ = ["RECIPES", "Fp8Linear", "Fp8Recipe", "check_fp8", "fp8_product", "quantise"]

_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """How operands are rounded: one scale for a tensor or one for each row of it.

    Activations and weights are e4m3. Gradients spread over more powers of two: with one scale for
    all of them they need e5m2's exponents.
    """

    per_row: bool
    gradient_dtype: torch.dtype


RECIPES: Mapping[str, Fp8Recipe] = {
    "tensor": Fp8Recipe(per_row=False, gradient_dtype=torch.float8_e5m2),
    "row": Fp8Recipe(per_row=True, gradient_dtype=torch.float8_e4m3fn),
}


def quantise(x_MK: Tensor, dtype: torch.dtype, per_row: bool) -> tuple[Tensor, Tensor]:
    """The tensor over its scales in `dtype`, and the float32 scales: [M, 1], or [1, 1] for all.

    The largest magnitude becomes the largest number of `dtype`; zeros get the scale 1. The result
    is contiguous; beside it a few rows in float32 are there at a time.
    """
    low, high = x_MK.aminmax(dim=1, keepdim=True) if per_row else x_MK.aminmax()
    largest = torch.maximum(-low, high).float().reshape(-1, 1)
    scale = (largest / torch.finfo(dtype).max).masked_fill_(largest == 0, 1.0)
    if torch.compiler.is_compiling():
        # fused into one kernel; a loop would make a graph for each number of rows
        return (x_MK / scale).to(dtype).contiguous(), scale
    rounded = torch.empty(x_MK.shape, dtype=dtype, device=x_MK.device)
    step = max(1, FP8_SCRATCH_ELEMENTS // x_MK.shape[1])
    for start in range(0, x_MK.shape[0], step):
        rows = slice(start, start + step)
        rounded[rows] = x_MK[rows] / (scale[rows] if per_row else scale)
    return rounded, scale


def fp8_product(
    a_MK: Tensor, b_NK: Tensor, recipe: Fp8Recipe, a_dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    """a @ b.T of operands rounded to `a_dtype` and e4m3, [M, N] in the dtype of `a`."""
    a, a_scale = quantise(a_MK, a_dtype, recipe.per_row)
    b, b_scale = quantise(b_NK, torch.float8_e4m3fn, recipe.per_row)
    # the hardware wants rows of `a` and columns of `b.T` contiguous, as they are here
    return torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=a_MK.dtype)


class Fp8Linear(nn.Linear):
    """`nn.Linear` whose output and input gradient are FP8 products."""

    recipe: Fp8Recipe

    @classmethod
    def adopt(cls, linear: nn.Linear, recipe: Fp8Recipe) -> None:
        """Make an existing projection one of ours; its parameters stay the same objects."""
        linear.__class__ = cls
        linear.recipe = recipe  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Fp8Project.apply(x, self.weight, self.bias, self.recipe)
        return output


class _Fp8Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Fp8Recipe
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        output = fp8_product(x.flatten(0, -2), weight, recipe).unflatten(0, x.shape[:-1])
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_source, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        source = None
        if needs_source:
            source = fp8_product(rows, weight.t(), ctx.recipe, ctx.recipe.gradient_dtype)
            source = source.unflatten(0, x.shape[:-1])
        return (
            source,
            rows.t() @ x.flatten(0, -2) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
        )


def check_fp8(
    name: str, device: torch.device, dtype: torch.dtype, widths: Mapping[str, int]
) -> None:
    """Make sure that recipe `name` runs here for projections of these widths; call it at start-up.

    Two small products are tried. Raises ConfigError.
    """
    if dtype != torch.bfloat16:
        raise ConfigError(
            f'infinipipe.model.fp8 needs bf16 training ("bf16": {{"enabled": true}}), not {dtype}'
        )
    for what, width in widths.items():
        if width % _MULTIPLE:
            raise ConfigError(
                f"infinipipe.model.fp8: the model's {what} {width} is no multiple of {_MULTIPLE}, "
                "which FP8 products need; set fp8 to off"
            )
    recipe = RECIPES[name]
    a = torch.eye(_MULTIPLE, device=device, dtype=dtype)
    b = torch.arange(1.0, 1 + _MULTIPLE, device=device, dtype=dtype).expand(32, -1).contiguous()
    for a_dtype in (torch.float8_e4m3fn, recipe.gradient_dtype):
        try:
            got = fp8_product(a, b, recipe, a_dtype)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"infinipipe.model.fp8 {name!r} cannot run on {_device_name(device)}: {reason}; "
                "set fp8 to off or try the other recipe"
            ) from error
        if not torch.allclose(got.float(), b.t().float(), rtol=0.07):
            raise ConfigError(
                f"infinipipe.model.fp8 {name!r} gives wrong products on {_device_name(device)}; "
                "set fp8 to off"
            )


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
