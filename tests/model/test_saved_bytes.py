"""What a decoder layer really keeps for its backward, against the planner's memory model."""

from __future__ import annotations

import pytest
import torch
from hf_reference import tiny_config
from planner_cases import setup_of
from torch import Tensor

from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.model.hf import load_hf_config, make_rotary
from ds_infinipipe.model.layers import DecoderLayer
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.facts.models import model_from_hf
from ds_infinipipe.planner.facts.setup import Execution, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.memory import MemoryModel

SIZES = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
CHUNKS = {
    "batched": Chunk((Slice(0, 0, 40, True), Slice(1, 0, 20, True)), padding=4),
    "split": Chunk((Slice(0, 16, 64, False),)),
    "hybrid": Chunk((Slice(0, 16, 48, True), Slice(1, 0, 12, True)), padding=4),
}


def kept_bytes(layer: DecoderLayer, context: ChunkContext, x: Tensor) -> int:
    """Bytes of all storages saved in forward, without parameters, rotary tables and the arena."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x.requires_grad_(), context)
    shared = [*layer.parameters(), *context.cos_sin]
    if context.arena is not None:
        rows = context.arena._layers[0]
        shared += [rows.key_NKD, rows.value_NKD]
    elsewhere = {t.untyped_storage().data_ptr() for t in shared}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for pointer, size in storages.items() if pointer not in elsewhere)


def chunk_context(values: dict, shape: Chunk, dtype: torch.dtype) -> ChunkContext:
    """The chunk's context on the CPU; the tokens before a slice are zeros in its arena."""
    arena = SequenceArena(80) if shape.keeps_kv else None
    if arena is not None:
        earlier = torch.zeros(shape.context_len, 2, 16, dtype=dtype)
        arena.write(earlier, earlier, 0, 0)
    rotary = make_rotary(load_hf_config(values), "cpu")
    return ChunkContext.from_chunk(shape, arena, None, rotary=rotary, device="cpu", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_the_memory_model_knows_what_a_layer_keeps(
    kind: str, chunk: str, dtype: torch.dtype
) -> None:
    values = tiny_config(kind, **SIZES)
    config, shape = load_hf_config(values), CHUNKS[chunk]
    context = chunk_context(values, shape, dtype)
    layer = DecoderLayer(config, 0).to(dtype)
    kept = kept_bytes(layer, context, torch.randn(1, shape.padded_tokens, 64).to(dtype))
    spec, how = model_from_hf(values), Execution(dtype_bytes=dtype.itemsize, fused_kernels=False)
    setup = setup_of(spec, make_layout(spec, 1, 1), execution=how)
    predicted = MemoryModel(setup).saved_bytes(shape)
    assert 0.85 * predicted < kept < 1.02 * predicted
