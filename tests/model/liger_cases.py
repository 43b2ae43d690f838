"""Layers with Liger's kernels against transformers' own, in Triton's interpreter.

Run by `tests/ops/test_triton_kernels.py` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import liger_kernel.ops.rms_norm
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter
from hf_reference import tiny_config
from planner_cases import setup_of
from test_saved_bytes import CHUNKS, SIZES, chunk_context, kept_bytes
from torch import Tensor, nn

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.hf import load_hf_config
from ds_infinipipe.model.layers import DecoderLayer, HeadLayer
from ds_infinipipe.model.liger import resolve_kernels, use_kernels
from ds_infinipipe.planner.facts.models import model_from_hf
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.memory import MemoryModel

KINDS = ["llama", "mistral", "qwen2", "qwen3"]
# the interpreter takes a row of each kernel at a time
_SHORT = Chunk((Slice(0, 7, 6, True), Slice(1, 0, 4, True)), padding=1)


class _Scalar(float):
    """A constant as the compiler sees it: the interpreter hands kernels plain floats instead."""

    def to(self, dtype: Any) -> _Scalar:
        return self


@pytest.fixture(autouse=True, scope="module")
def _interpreter_knows_what_liger_uses() -> Iterator[None]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = [_Scalar(a) if type(a) is float else a for a in args]
        return interpret(self, *wrapped, **kwargs)

    interpret = triton.runtime.interpreter.InterpretedFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", run)
        # libdevice's function exists on GPUs only
        patch.setattr(liger_kernel.ops.rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
        yield


@pytest.fixture(autouse=True)
def _torch_again() -> Iterator[None]:
    yield
    for kind in KINDS:
        use_kernels(load_hf_config(tiny_config(kind)), "torch")


def _decoder(values: dict, kernels: str) -> DecoderLayer:
    config = load_hf_config(values)
    use_kernels(config, kernels)
    torch.manual_seed(0)
    layer = DecoderLayer(config, 0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return layer


def _pass(layer: DecoderLayer, values: dict, chunk: Chunk) -> list[Tensor]:
    """Output and all gradients."""
    context = chunk_context(values, chunk, torch.float32)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, chunk.padded_tokens, 64, generator=generator).requires_grad_()
    out = layer(x, context)
    grad = torch.randn(*out.shape, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad)]


@pytest.mark.parametrize("kind", KINDS)
def test_ligers_layer_equals_transformers_layer(kind: str) -> None:
    values, chunk = tiny_config(kind, **SIZES), _SHORT
    expected = _pass(_decoder(values, "torch"), values, chunk)
    layer = _decoder(values, "liger")
    assert type(layer.block.mlp).__name__ == "LigerSwiGLUMLP"
    assert type(layer.block.input_layernorm).__name__ == "LigerRMSNorm"
    for got, want in zip(_pass(layer, values, chunk), expected, strict=True):
        assert ((got - want).norm() / want.norm()).item() < 2e-6


def test_rotary_and_classes_come_back_with_torch() -> None:
    from transformers.models.llama import modeling_llama

    config = load_hf_config(tiny_config("llama"))
    before = (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm)
    use_kernels(config, "liger")
    assert modeling_llama.apply_rotary_pos_emb is not before[0]
    use_kernels(config, "torch")
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm) == before


def test_names_and_shapes_of_parameters_stay() -> None:
    values = tiny_config("qwen3")
    shapes = [
        {n: p.shape for n, p in _decoder(values, kernels).named_parameters()}
        for kernels in ("torch", "liger")
    ]
    assert shapes[0] == shapes[1]


def test_the_heads_norm_is_ligers_too() -> None:
    config = load_hf_config(tiny_config("llama"))
    heads = []
    for kernels in ("torch", "liger"):
        use_kernels(config, kernels)
        torch.manual_seed(0)
        heads.append(HeadLayer(config))
    labels, hidden = torch.arange(9), torch.randn(1, 9, 32)
    results = []
    for head in heads:
        x = hidden.clone().requires_grad_()
        loss = head.loss(x, labels, 0.1, 4)
        results.append([loss.detach(), *torch.autograd.grad(loss, [x, *head.parameters()])])
    for want, got in zip(*results, strict=True):
        assert ((got - want).norm() / want.norm()).item() < 2e-6


@pytest.mark.parametrize("chunk", ["batched", "split"])
def test_the_memory_model_of_fused_kernels_knows_what_ligers_layer_keeps(chunk: str) -> None:
    values = tiny_config("llama", **SIZES)
    context = chunk_context(values, CHUNKS[chunk], torch.float32)
    kept = kept_bytes(
        _decoder(values, "liger"), context, torch.randn(1, CHUNKS[chunk].padded_tokens, 64)
    )
    spec = model_from_hf(values)
    setup = setup_of(spec, make_layout(spec, 1, 1), dtype_bytes=4)
    predicted = MemoryModel(setup).saved_bytes(CHUNKS[chunk])
    assert 0.85 * predicted < kept < 1.02 * predicted


def test_what_liger_cannot_do_is_told_apart() -> None:
    for changes, reason in (
        ({"hidden_act": "gelu"}, "for silu and the model has gelu"),
        ({"mlp_bias": True}, "no biases"),
    ):
        config = load_hf_config(tiny_config("llama", **changes))
        assert resolve_kernels("auto", config, "cuda", torch.bfloat16) == "torch"
        with pytest.raises(ConfigError, match=reason):
            resolve_kernels("liger", config, "cuda", torch.bfloat16)
    plain = load_hf_config(tiny_config("llama"))
    assert resolve_kernels("auto", plain, "cuda", torch.bfloat16) == "liger"
    with pytest.raises(ConfigError, match="float64"):
        resolve_kernels("liger", plain, "cuda", torch.float64)
