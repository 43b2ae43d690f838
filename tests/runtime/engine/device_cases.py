"""A stage on a device that is not the CPU, without having one: torch's fake tensors.

Fake tensors have shapes, dtypes and devices, but no values. So an operand that was left on the CPU
is an error here as it is on a GPU, and so is reading a value back, for which a GPU would have to be
waited for. Run by `test_device.py` in a process of its own, as the device is torch's for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hf_reference import tiny_config
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.hf import load_hf_config, make_rotary
from ds_infinipipe.model.layers import build_stage_layers
from ds_infinipipe.ops import attention
from ds_infinipipe.ops.fp8 import RECIPES, Fp8Linear
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.runtime.ranks.clock import WaitTimes
from ds_infinipipe.runtime.stage.executor import ChunkInput, StageExecutor

_setup_privateuseone_for_python_backend("gpu")
GPU = torch.device("gpu", 0)
LENGTHS = (23, 9, 6)
CHUNKS = (
    Chunk((Slice(0, 0, 8, False), Slice(1, 0, 9, True)), padding=3),
    Chunk((Slice(0, 8, 5, False),)),
    Chunk((Slice(0, 13, 10, True), Slice(2, 0, 6, True)), padding=2),
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", pad_token_id=11, num_hidden_layers=1),
    "mistral with a window": tiny_config("mistral", sliding_window=5, num_hidden_layers=1),
    "qwen2": tiny_config("qwen2", num_hidden_layers=1),
    "qwen3": tiny_config("qwen3", num_hidden_layers=1),
}


class _OneRank:
    """The sharding of parameters that are all there and whose gradients stay where they are."""

    loss_multiplier = 1.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture(autouse=True)
def _fake_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # what is there on a CUDA device cannot be asked of one that is not known to torch's kernels
    monkeypatch.setattr(attention, "_LADDER", ("sdpa",))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


class Stage:
    """One whole model on the fake device, and the chunks' inputs there."""

    def __init__(self, values: dict[str, Any], dtype: torch.dtype, impl: str = "auto") -> None:
        config = load_hf_config(values)
        last = config.num_hidden_layers
        torch.set_default_dtype(dtype)
        with GPU:
            self.layers = build_stage_layers(config, 0, last, is_first=True, is_last=True)
        torch.set_default_dtype(torch.float32)
        self.executor = StageExecutor(self.layers, _OneRank(), WaitTimes(GPU))
        self.executor.begin_step(1 / 38, 7)
        self.arenas = {0: SequenceArena(LENGTHS[0])}
        self._rotary, self._dtype, self._impl = make_rotary(config, GPU), dtype, impl

    def given(self, chunk: Chunk) -> ChunkInput:
        tokens = chunk.padded_tokens
        context = ChunkContext.from_chunk(
            chunk,
            self.arenas[0] if chunk.keeps_kv else None,
            None,
            rotary=self._rotary,
            device=GPU,
            dtype=self._dtype,
            attention_impl=self._impl,
        )
        ids, labels = (torch.zeros(tokens, dtype=torch.int64, device=GPU) for _ in range(2))
        weights = torch.ones(tokens, device=GPU)
        return ChunkInput(context, ids_T=ids, labels_T=labels, weights_T=weights)

    def check_gradients(self, dtype: torch.dtype) -> None:
        for layer in self.layers:
            for name, parameter in layer.named_parameters():
                gradient = parameter.grad
                assert gradient is not None, name
                assert (gradient.device, gradient.dtype) == (GPU, dtype), name


@pytest.mark.parametrize(("dtype", "recompute"), [(torch.bfloat16, 0), (torch.float32, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_stays_on_the_device(model: str, dtype: torch.dtype, recompute: int) -> None:
    stage = Stage(MODELS[model], dtype)
    for index, chunk in enumerate(CHUNKS):
        stage.executor.forward(index, stage.given(chunk), recompute)
    for index in reversed(range(len(CHUNKS))):
        stage.executor.backward(index, None)
    assert stage.arenas[0].is_empty
    stage.check_gradients(dtype)


@pytest.mark.parametrize("model", MODELS)
def test_split_backwards_stay_on_the_device(model: str) -> None:
    stage = Stage(MODELS[model], torch.bfloat16)
    for index, chunk in enumerate(CHUNKS):
        stage.executor.forward(index, stage.given(chunk), 0)
    for index in reversed(range(len(CHUNKS))):
        stage.executor.backward_input(index, None)
    for index in reversed(range(len(CHUNKS))):
        stage.executor.backward_weight(index)
    stage.check_gradients(torch.bfloat16)


@pytest.mark.parametrize("model", MODELS)
def test_an_evaluation_stays_on_the_device(model: str) -> None:
    stage = Stage(MODELS[model], torch.bfloat16)
    for chunk in CHUNKS:
        losses = stage.executor.evaluate(stage.given(chunk))
        assert losses.device == GPU and len(losses) == chunk.padded_tokens


@pytest.mark.parametrize("model", MODELS)
def test_torchs_varlen_attention_takes_what_the_stage_gives_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LADDER", ("torch_varlen",))
    monkeypatch.setattr(attention, "_obstacle", lambda *_: None)
    stage = Stage(MODELS[model], torch.bfloat16)
    for index, chunk in enumerate(CHUNKS):
        stage.executor.forward(index, stage.given(chunk), 0)
    for index in reversed(range(len(CHUNKS))):
        stage.executor.backward(index, None)
    stage.check_gradients(torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_projections_in_8_bits_stay_on_the_device(recipe: str) -> None:
    with GPU:
        linear = torch.nn.Linear(32, 48, bias=True, dtype=torch.bfloat16)
        x = torch.randn(1, 19, 32, dtype=torch.bfloat16, requires_grad=True)
    Fp8Linear.adopt(linear, RECIPES[recipe])
    linear(x).sum().backward()
    for tensor in (x, linear.weight, linear.bias):
        assert tensor.grad is not None and tensor.grad.device == GPU


def test_an_operand_left_on_the_cpu_is_found() -> None:
    stage = Stage(MODELS["llama"], torch.float32)
    given = stage.given(CHUNKS[0])
    given.weights_T = torch.ones(CHUNKS[0].padded_tokens)
    with pytest.raises(RuntimeError, match="device"):
        stage.executor.forward(0, given, 0)


def test_a_value_read_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(MODELS["llama"], torch.float32)
    head = stage.layers[-1]
    loss = head.loss
    monkeypatch.setattr(head, "loss", lambda *a: loss(*a) * float(a[0].sum().detach()))
    with pytest.raises(DataDependentOutputException):
        stage.executor.forward(0, stage.given(CHUNKS[0]), 0)
