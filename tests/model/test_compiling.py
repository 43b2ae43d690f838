"""Decoder layers through torch.compile: equal results, and few graphs for many lengths."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from effort import is_thorough
from hf_reference import exact_norms, tiny_config
from torch import Tensor

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model import compiling
from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.hf import load_hf_config, make_rotary
from ds_infinipipe.model.layers import DecoderLayer
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.plan.chunks import Chunk, Slice

NUM_LAYERS = 2


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with exact_norms():
        yield
    torch._dynamo.reset()


def _num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _context(values: dict, chunk: Chunk, dtype: torch.dtype = torch.float64) -> ChunkContext:
    arena = SequenceArena(chunk.slices[0].end) if chunk.keeps_kv else None
    for layer in range(NUM_LAYERS if arena is not None else 0):
        earlier = torch.ones(chunk.context_len, 2, 8, dtype=dtype)
        arena.write(earlier, earlier, layer, 0)
    rotary = make_rotary(load_hf_config(values), "cpu")
    return ChunkContext.from_chunk(chunk, arena, None, rotary=rotary, device="cpu", dtype=dtype)


def _layers(values: dict) -> list[DecoderLayer]:
    config = load_hf_config(values)
    torch.manual_seed(0)
    return [DecoderLayer(config, index).double() for index in range(NUM_LAYERS)]


def _pass(
    layers: list[DecoderLayer], values: dict, chunk: Chunk, also_without_graph: bool = True
) -> list[Tensor]:
    """Outputs without and with a graph, and all gradients, layer by layer."""
    generator = torch.Generator().manual_seed(chunk.tokens)
    hidden = torch.randn(1, chunk.padded_tokens, 32, generator=generator, dtype=torch.float64)
    context, found = _context(values, chunk), []
    for layer in layers:
        with torch.no_grad():
            found += [layer(hidden, context)] if also_without_graph else []
        x = hidden.clone().requires_grad_()
        out = layer(x, context)
        found += [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]
        hidden = out.detach()
    return found


def _chunks() -> list[Chunk]:
    most = 20 if is_thorough() else 8
    whole = [Chunk((Slice(0, 0, n, True),)) for n in (5, 1, *range(2, most, 3))]
    hybrids = [
        Chunk((Slice(0, 6, n, True), Slice(1, 0, n + 1, True)), padding=n % 3)
        for n in range(1, most, 2)
    ]
    return [*whole, *hybrids]


def _check_saved(layer: DecoderLayer, values: dict) -> None:
    """A view of a gathered weight would hold its memory from forward to backward."""
    saved: list[Tensor] = []
    context = _context(values, Chunk((Slice(0, 0, 7, True),)))
    x = torch.randn(1, 7, 32, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x, context)
    own = {p.untyped_storage().data_ptr(): p for p in layer.parameters()}
    kept = [t for t in saved if t.untyped_storage().data_ptr() in own]
    assert len(kept) >= 7
    assert all(t is own[t.untyped_storage().data_ptr()] for t in kept)


@pytest.mark.slow
def test_any_length_gives_equal_results_from_the_same_few_graphs_that_keep_parameters() -> None:
    values = tiny_config("llama")
    plain, compiled = _layers(values), _layers(values)
    for layer in compiled:
        before = dict(layer.named_parameters())
        compiling.compile_block(layer.block, backend="aot_eager")
        assert dict(layer.named_parameters()) == before
    counts = []
    for chunk in _chunks():
        both = (_pass(x, values, chunk, is_thorough()) for x in (compiled, plain))
        for got, want in zip(*both, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        counts.append(_num_graphs())
    # before and behind attention, with and without gradients, for 1 token and for more
    assert counts[1] == counts[-1] <= 16
    assert torch._dynamo.utils.counters["frames"]["total"] <= 32
    _check_saved(compiled[0], values)
    assert _num_graphs() == counts[-1]


@pytest.mark.slow
def test_windows_stay_outside_of_graphs() -> None:
    values = tiny_config("mistral", sliding_window=4)
    plain, compiled = _layers(values)[:1], _layers(values)[:1]
    compiling.compile_block(compiled[0].block, backend="eager")
    chunk = Chunk((Slice(0, 6, 9, True), Slice(1, 0, 4, True)))
    pairs = zip(*(_pass(x, values, chunk) for x in (compiled, plain)), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert _num_graphs() > 0


@pytest.mark.slow
@pytest.mark.skipif(
    not (is_thorough() and shutil.which("g++")),
    reason="making machine code of the graphs is torch's own, and takes 50 s: when thorough",
)
def test_a_layer_compiled_to_machine_code_gives_equal_results() -> None:
    values = tiny_config("qwen3")  # whose heads are normed, too
    plain, compiled = _layers(values)[:1], _layers(values)[:1]
    compiling.compile_block(compiled[0].block)
    chunk = Chunk((Slice(0, 6, 9, True), Slice(1, 0, 4, True)))
    pairs = zip(*(_pass(x, values, chunk, False) for x in (compiled, plain)), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert _num_graphs() > 0


def test_fp8_layers_compile_into_few_graphs_too() -> None:
    values = tiny_config("llama")
    config = load_hf_config(values)
    torch.manual_seed(0)
    plain = DecoderLayer(config, 0, fp8="row").bfloat16()
    compiled = DecoderLayer(config, 0, fp8="row").bfloat16()
    compiled.load_state_dict(plain.state_dict())
    compiling.compile_block(compiled.block, backend="aot_eager")
    counts = []
    for length in (5, 8, 31):
        context = _context(values, Chunk((Slice(0, 0, length, True),)), torch.bfloat16)
        x = torch.randn(1, length, 32).bfloat16()
        results = []
        for layer in (plain, compiled):
            source = x.clone().requires_grad_()
            out = layer(source, context)
            inputs = [source, *layer.parameters()]
            results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
        for want, got in zip(*results, strict=True):
            assert torch.equal(got, want)
        counts.append(_num_graphs())
    assert counts[0] == counts[-1] > 0


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.check_compiling(torch.device("cpu"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="there is no C\\+\\+ compiler"):
        compiling.check_compiling(torch.device("cpu"))
