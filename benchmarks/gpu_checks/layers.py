"""One decoder layer in each of its kinds: transformers' kernels, Liger's, FP8, compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.compiling import check_compiling, compile_block
from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.hf import load_hf_config, make_rotary
from ds_infinipipe.model.layers import DecoderLayer
from ds_infinipipe.model.liger import resolve_kernels, use_kernels
from ds_infinipipe.ops.fp8 import check_fp8
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from gpu_checks.measure import Budget, Row, Sizes, seconds

__all__ = ["check_layers"]

_WAYS = {
    "torch": ("torch", "off", False),
    "liger": ("liger", "off", False),
    "compiled": ("torch", "off", True),
    "fp8 tensor": ("torch", "tensor", False),
    "fp8 row": ("torch", "row", False),
    "fp8 row compiled": ("torch", "row", True),
}
"""Kernels, FP8 recipe, and whether it is compiled, as `infinipipe.model` has them."""

_MOST_ERROR = {"off": 0.02, "tensor": 0.1, "row": 0.1}
"""Of output and input gradient, relative to the plain layer's norm: rounding to 8 or to 3 bits."""


def check_layers(sizes: Sizes, budget: Budget) -> Iterator[Row]:
    """Time of forward and backward relative to the first way, and the difference from it."""
    bench = _Bench(sizes)
    plain: list[Tensor] = []
    plain_s = 0.0
    for name, (kernels, fp8, compiled) in _WAYS.items():
        if (compiled and fp8 != "off") if sizes.is_dry else budget.left_s < 15:
            note = "left out of dry runs" if sizes.is_dry else "no time left"
            yield Row("layer", name, None, "", note=note)
            continue
        try:
            layer = bench.build(kernels, fp8, compiled)
            found = bench.run(layer)
        except ConfigError as error:
            yield Row("layer", name, None, "", note=str(error))
            continue
        if not plain:
            plain, plain_s = found, bench.seconds(layer)
            yield Row("layer", name, plain_s * 1e3, "ms")
            continue
        error, limit = _difference(found, plain), _MOST_ERROR[fp8]
        yield Row("layer", f"{name} difference", error, "", f"<= {limit:g}", error <= limit)
        yield Row("layer", f"{name} / torch", bench.seconds(layer) / plain_s, "time")


class _Bench:
    """A whole document through one layer whose weights are always the same."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        # FP8 exists for bf16 training only, also on a CPU
        self._dtype = torch.bfloat16
        self._config = load_hf_config(sizes.layer_model)
        chunk = Chunk((Slice(0, 0, sizes.slice_tokens, True),))
        self._context = ChunkContext.from_chunk(
            chunk,
            None,
            None,
            rotary=make_rotary(self._config, sizes.device),
            device=sizes.device,
            dtype=self._dtype,
        )
        torch.manual_seed(0)
        shape = (1, sizes.slice_tokens, self._config.hidden_size)
        self._x = torch.randn(shape, device=sizes.device, dtype=self._dtype, requires_grad=True)
        self._gradient = torch.randn(shape, device=sizes.device, dtype=self._dtype)

    def build(self, kernels: str, fp8: str, compiled: bool) -> DecoderLayer:
        """Raises ConfigError where this kind of layer cannot run."""
        device, config = self._sizes.device, self._config
        use_kernels(config, resolve_kernels(kernels, config, device.type, self._dtype))
        if fp8 != "off":
            widths = {"hidden": config.hidden_size, "intermediate": config.intermediate_size}
            check_fp8(fp8, device, self._dtype, widths)
        if compiled:
            check_compiling(device)
        torch.manual_seed(1)
        layer = DecoderLayer(config, 0, fp8=fp8)
        if compiled:
            # a dry run traces only: machine code for the CPU says nothing about a GPU
            compile_block(layer.block, "aot_eager" if self._sizes.is_dry else "inductor")
        return layer.to(device, self._dtype)

    def run(self, layer: DecoderLayer) -> list[Tensor]:
        """Output and input gradient."""
        out = layer(self._x, self._context)
        gradients = torch.autograd.grad(
            out, [self._x, *layer.parameters()], self._gradient, allow_unused=False
        )
        return [out.detach(), gradients[0]]

    def seconds(self, layer: DecoderLayer) -> float:
        """Of forward and backward, weights' gradients and all."""
        return seconds(lambda: self.run(layer), self._sizes)


def _difference(found: list[Tensor], plain: list[Tensor]) -> float:
    return max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(found, plain, strict=True)
    )
