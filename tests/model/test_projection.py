"""Weights whose gradients are taken after the rest of a backward."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_reference import tiny_config
from planner_cases import setup_of
from torch import Tensor, nn

from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.hf import load_hf_config, make_rotary
from ds_infinipipe.model.layers import DecoderLayer, EmbeddingLayer
from ds_infinipipe.model.projection import EarlyGradient, Projection, WeightWork, add_gradient
from ds_infinipipe.planner.facts.models import model_from_hf
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.layer_bytes import stashed_token_bytes

CHUNK = Chunk((Slice(0, 0, 20, True), Slice(1, 0, 11, True)), padding=1)
SIZES = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}


def _gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def _context(config: object, dtype: torch.dtype) -> ChunkContext:
    return ChunkContext.from_chunk(
        CHUNK, None, None, rotary=make_rotary(config, "cpu"), device="cpu", dtype=dtype
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_layers_gradients_in_two_halves_equal_those_of_one_backward(kind: str) -> None:
    config = load_hf_config(tiny_config(kind, **SIZES))
    whole = DecoderLayer(config, 0).double()
    split = copy.deepcopy(whole)
    context = _context(config, torch.float64)
    x, seed = torch.randn(2, 1, CHUNK.padded_tokens, 64, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    whole(inputs[0], context).backward(seed)
    output = split(inputs[1], context)
    with split.leaving_weights() as work:
        output.backward(seed)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert not _gradients(split)  # also those of norms wait, each chunk's apart
    names = {id(p): name for name, p in split.named_parameters()}
    early = [names[id(item.parameter)] for item in work if isinstance(item, EarlyGradient)]
    assert early and all("norm" in name for name in early)
    assert sum(isinstance(item, WeightWork) for item in work) == 7 == len(work) - len(early)
    for item in work:
        item.take()
    expected, found = _gradients(whole), _gradients(split)
    assert expected.keys() == found.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    split(inputs[1], context).backward(seed)  # whole again: everything comes at once
    assert all(torch.allclose(2 * expected[n], g) for n, g in _gradients(split).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_memory_model_knows_what_lies_between_the_halves(kind: str, dtype: torch.dtype) -> None:
    values = tiny_config(kind, **SIZES)
    config = load_hf_config(values)
    layer = DecoderLayer(config, 0).to(dtype)
    x = torch.randn(1, CHUNK.padded_tokens, 64).to(dtype).requires_grad_()
    output = layer(x, _context(config, dtype))
    with layer.leaving_weights() as work:
        output.backward(torch.randn_like(output))
    halves = [item for item in work if isinstance(item, WeightWork)]
    kept = [t.untyped_storage() for item in halves for t in (item.source, item.output_gradient)]
    spec = model_from_hf(values)
    setup = setup_of(spec, make_layout(spec, 1, 1), dtype_bytes=dtype.itemsize)
    found = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
    assert found == CHUNK.padded_tokens * stashed_token_bytes(setup)
    assert all(item.source.grad_fn is None for item in halves)


def test_a_gradient_that_is_part_of_a_larger_tensor_is_copied() -> None:
    projection = Projection(4, 3)
    x = torch.randn(5, 4, requires_grad=True)
    projection.left = work = []
    projection(x).backward(torch.randn(50, 3)[:5])
    assert work[0].output_gradient.untyped_storage().nbytes() == 5 * 3 * 4


def test_a_parameter_that_is_elsewhere_takes_gradients_and_stays_empty() -> None:
    parameter = nn.Parameter(torch.empty(0))
    gradient = torch.randn(3, 4)
    add_gradient(parameter, gradient.clone())
    assert parameter.shape == (0,) and torch.equal(parameter.grad, gradient)
    add_gradient(parameter, gradient)
    assert torch.equal(parameter.grad, 2 * gradient)


@pytest.mark.parametrize("padding", [None, 3])
def test_the_embeddings_gradient_is_autograds(padding: int | None) -> None:
    config = load_hf_config(tiny_config("llama", pad_token_id=padding))
    layer = EmbeddingLayer(config)
    ids = torch.tensor([1, 3, 1, 7])
    output = layer(ids)
    seed = torch.randn_like(output)
    output.backward(seed)
    assert torch.equal(layer.weight_gradient(ids, seed), layer.embed_tokens.weight.grad)


def test_a_frozen_weight_gets_no_gradient() -> None:
    projection = Projection(4, 3)
    projection.weight.requires_grad_(False)
    x = torch.randn(5, 4, requires_grad=True)
    projection(x).sum().backward()
    projection.left = work = []
    projection(x).sum().backward()
    work[0].take()
    assert projection.weight.grad is None
    assert torch.equal(projection.bias.grad, torch.full((3,), 10.0))


def test_a_projection_does_without_the_linear_that_deepspeed_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    projection, x = Projection(5, 3), torch.randn(2, 4, 5, requires_grad=True)
    wanted = torch.nn.functional.linear(x, projection.weight, projection.bias)

    def replaced(*_: object) -> None:
        raise AssertionError("each call of DeepSpeed's reads a signature, for 40 microseconds")

    monkeypatch.setattr(torch.nn.functional, "linear", replaced)
    assert torch.equal(projection(x), wanted)
