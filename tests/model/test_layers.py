"""Our stage layers against transformers' own models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hf_reference import document_loss, exact_norms, reference_model, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.hf import hf_class, load_hf_config, make_rotary, max_positions
from ds_infinipipe.model.layers import (
    DecoderLayer,
    EmbeddingLayer,
    HeadLayer,
    StageLayer,
    build_stage_layers,
    hf_names,
)
from ds_infinipipe.model.weights import init_parameter
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.plan.chunks import Chunk, Slice

LENGTHS = (23, 9, 1, 6)
CHUNKS = (
    Chunk((Slice(0, 0, 8, False), Slice(1, 0, 9, True)), padding=3),
    Chunk((Slice(0, 8, 5, False),)),
    Chunk((Slice(0, 13, 10, True), Slice(2, 0, 1, True), Slice(3, 0, 6, True)), padding=2),
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": tiny_config("llama"),
    "llama tied": tiny_config("llama", tie_word_embeddings=True),
    "llama with biases": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama 3 rope": tiny_config("llama", rope_parameters=LLAMA3_ROPE),
    # a token of the documents, whose embedding transformers does not train
    "llama with a padding token": tiny_config("llama", pad_token_id=11),
    "mistral": tiny_config("mistral"),
    "mistral with a window": tiny_config("mistral", sliding_window=5),
    "qwen2": tiny_config("qwen2"),
    "qwen2 tied": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen2 with a window in one layer": tiny_config(
        "qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=2
    ),
    "qwen3": tiny_config("qwen3"),
    "qwen3 multi-head": tiny_config("qwen3", num_key_value_heads=4),
}


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_norms():
        yield


def _documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(50, (n,), generator=generator) for n in LENGTHS]


def _shifted(ids: Tensor) -> Tensor:
    return torch.cat([ids[1:], torch.tensor([-100])])


def _pack(sequences: list[Tensor], chunk: Chunk, filler: int) -> Tensor:
    parts = [sequences[s.sequence][s.start : s.end] for s in chunk.slices]
    return torch.cat([*parts, torch.full((chunk.padding,), filler)])


def _layers(values: dict, seed: int = 0) -> list[StageLayer]:
    config = load_hf_config(values)
    layers = build_stage_layers(config, 0, config.num_hidden_layers, is_first=True, is_last=True)
    for layer in layers:
        layer.double()
        for name, parameter in layer.named_parameters():
            init_parameter(
                hf_names(layer)[name],
                parameter,
                seed,
                config.initializer_range,
                config.pad_token_id,
            )
    return layers


def _contexts(values: dict, chunks: tuple[Chunk, ...]) -> list[ChunkContext]:
    rotary = make_rotary(load_hf_config(values), "cpu")
    arenas = {s.sequence: SequenceArena(LENGTHS[s.sequence]) for c in chunks for s in c.slices}
    return [
        ChunkContext.from_chunk(
            chunk,
            arenas[chunk.slices[0].sequence] if chunk.keeps_kv else None,
            None,
            rotary=rotary,
            device="cpu",
            dtype=torch.float64,
        )
        for chunk in chunks
    ]


def _hidden(layers: list[StageLayer], ids: Tensor, context: ChunkContext) -> Tensor:
    x = layers[0](ids)
    for layer in layers[1:-1]:
        x = layer(x, context)
    return x


def _grads(layers: list[StageLayer]) -> dict[str, Tensor]:
    """Gradients by checkpoint name; a tied weight's two add up."""
    grads: dict[str, Tensor] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            hf_name = layer.hf_name(name)
            assert parameter.grad is not None
            grads[hf_name] = grads.get(hf_name, 0) + parameter.grad
    return grads


@pytest.mark.parametrize("model", MODELS)
def test_sliced_and_packed_chunks_train_like_each_document_alone(model: str) -> None:
    values, documents = MODELS[model], _documents()
    reference = reference_model(values)
    expected = document_loss(reference, documents, 1 / 35)
    expected.backward()
    layers = _layers(values)
    labels = [_shifted(d) for d in documents]
    losses = [
        layers[-1].loss(
            _hidden(layers, _pack(documents, chunk, 0), context),
            _pack(labels, chunk, -100),
            1 / 35,
            7,
        )
        for chunk, context in zip(CHUNKS, _contexts(values, CHUNKS), strict=True)
    ]
    for loss in reversed(losses):
        loss.backward()
    torch.testing.assert_close(sum(losses), expected, rtol=1e-12, atol=1e-12)
    grads = _grads(layers)
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "llama 3 rope"])
def test_logits_equal_those_of_transformers(model: str) -> None:
    values, ids = MODELS[model], _documents()[0]
    chunk = Chunk((Slice(0, 0, LENGTHS[0], True),))
    layers = _layers(values)
    logits = layers[-1](_hidden(layers, ids, _contexts(values, (chunk,))[0]))
    expected = reference_model(values)(input_ids=ids[None], use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_another_document_does_not_change_a_bit_of_the_logits() -> None:
    values, documents = MODELS["llama"], _documents()
    chunk = Chunk((Slice(0, 0, 23, True), Slice(1, 0, 9, True)), padding=2)
    layers, context = _layers(values), _contexts(values, (chunk,))[0]
    before = layers[-1](_hidden(layers, _pack(documents, chunk, 0), context))
    documents[0] = (documents[0] + 1) % 50
    after = layers[-1](_hidden(layers, _pack(documents, chunk, 0), context))
    assert not torch.equal(before[:, :23], after[:, :23])
    assert torch.equal(before[:, 23:], after[:, 23:])


def test_recomputed_layers_give_the_same_gradients() -> None:
    values, documents = MODELS["qwen3"], _documents()
    labels = [_shifted(d) for d in documents]
    results = []
    for recompute in (False, True):
        layers, contexts = _layers(values), _contexts(values, CHUNKS)
        packed = [_pack(documents, chunk, 0) for chunk in CHUNKS]
        pairs = list(zip(packed, contexts, strict=True))
        with torch.set_grad_enabled(not recompute):
            hidden = [_hidden(layers, *pair) for pair in pairs]
        for i in reversed(range(len(CHUNKS))):
            x = _hidden(layers, *pairs[i]) if recompute else hidden[i]
            layers[-1].loss(x, _pack(labels, CHUNKS[i], -100), 1.0, 7).backward()
        assert contexts[0].arena is not None and contexts[0].arena.is_empty
        results.append(_grads(layers))
    for name, grad in results[0].items():
        torch.testing.assert_close(grad, results[1][name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("model", ["llama", "llama tied", "llama with biases", "qwen2", "qwen3"])
def test_names_and_shapes_are_those_of_the_checkpoint(model: str) -> None:
    ours = {
        layer.hf_name(name): p.shape
        for layer in _layers(MODELS[model])
        for name, p in layer.named_parameters()
    }
    theirs = {name: p.shape for name, p in reference_model(MODELS[model]).named_parameters()}
    assert ours == theirs


def test_a_stage_holds_its_own_layers_only() -> None:
    config = load_hf_config(tiny_config("llama"))
    first = build_stage_layers(config, 0, 1, is_first=True, is_last=False)
    last = build_stage_layers(config, 1, 3, is_first=False, is_last=True)
    assert [type(x) for x in first] == [EmbeddingLayer, DecoderLayer]
    assert [type(x) for x in last] == [DecoderLayer, DecoderLayer, HeadLayer]
    assert last[0].hf_name("block.mlp.up_proj.weight") == "model.layers.1.mlp.up_proj.weight"
    assert last[1].hf_name("block.mlp.up_proj.weight") == "model.layers.2.mlp.up_proj.weight"


def test_a_tied_head_has_the_embeddings_name() -> None:
    config = load_hf_config(tiny_config("llama", tie_word_embeddings=True))
    assert HeadLayer(config).hf_name("lm_head.weight") == "model.embed_tokens.weight"
    config = load_hf_config(tiny_config("llama"))
    assert HeadLayer(config).hf_name("lm_head.weight") == "lm_head.weight"


def test_a_decoder_layer_refuses_a_config_with_another_attention() -> None:
    with pytest.raises(ConfigError, match="comes from load_hf_config"):
        DecoderLayer(reference_model(tiny_config("llama")).config, 0)


def test_our_attention_is_refused_outside_our_layers() -> None:
    config = load_hf_config(tiny_config("llama"))
    model = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = "infinipipe"
    with pytest.raises(ConfigError, match="attn_implementation='sdpa'"):
        model(input_ids=torch.arange(5)[None])


def test_rotary_frequencies_stay_float32() -> None:
    config = load_hf_config(tiny_config("llama"))
    torch.set_default_dtype(torch.float64)
    try:
        rotary = make_rotary(config, "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    cos, sin = rotary(torch.empty(0, dtype=torch.float64), torch.tensor([[0, 5]]))
    assert rotary.inv_freq.dtype == torch.float32
    assert cos.dtype == torch.float64 and cos.shape == (1, 2, 8)
    # position 5, lowest pair: frequency 1
    assert cos[0, 1, 0].item() == pytest.approx(0.28366218, abs=1e-7)
    assert sin[0, 1, 0].item() == pytest.approx(-0.95892427, abs=1e-7)


def test_the_models_own_classes_are_found() -> None:
    config = load_hf_config(tiny_config("qwen3"))
    assert hf_class(config, "DecoderLayer").__name__ == "Qwen3DecoderLayer"
    assert max_positions(config) == 256
