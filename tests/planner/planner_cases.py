"""Small models and batches for the tests of rows, recomputation, grouping and search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.rows import PipelineMemory, measure_chunks, pipeline_memory
from ds_infinipipe.planner.specs import BUILTIN_CLUSTERS, Layout, ModelSpec, make_layout
from ds_infinipipe.planner.types import Chunk, Slice

CLUSTER = replace(BUILTIN_CLUSTERS["cpu-local"], memory_bytes=2**30)


def unhurried(max_examples: int = 100) -> settings:
    """For properties: a busy machine is no failure."""
    slow = [HealthCheck.too_slow]
    return settings(deadline=None, max_examples=max_examples, suppress_health_check=slow)


def tiny_model(num_layers: int) -> ModelSpec:
    return ModelSpec("tiny", num_layers, 32, 64, 4, 2, 8, 128, dtype_bytes=4, fused_kernels=False)


def cut(sequence: int, *lengths: int) -> list[Chunk]:
    """A sequence cut into slices of these lengths, one chunk each."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    last = len(lengths) - 1
    return [
        Chunk((Slice(sequence, start, length, i == last),))
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def batched(sequence: int, *lengths: int) -> Chunk:
    return Chunk(tuple(Slice(sequence + i, 0, n, True) for i, n in enumerate(lengths)))


def memory_of(
    chunks: Sequence[Chunk], memory: MemoryModel, members: Sequence[int] | None = None
) -> PipelineMemory:
    figures = measure_chunks(memory, memory.layout, chunks)
    chosen = range(len(chunks)) if members is None else members
    return pipeline_memory(chunks, chosen, memory.layout, memory.static_bytes, figures)


@st.composite
def small_pipelines(
    draw: st.DrawFn, max_sequences: int = 4, max_layers: int = 5, max_pp: int = 3
) -> tuple[tuple[Chunk, ...], MemoryModel]:
    """Chunks of a few sequences, some cut, some with a short beside any slice, and a model."""
    pp = draw(st.integers(1, max_pp))
    layers = draw(st.integers(pp, max_layers))
    layout: Layout = make_layout(tiny_model(layers), pp, draw(st.sampled_from([1, 2])))
    chunks: list[Chunk] = []
    sequence = 0
    for _ in range(draw(st.integers(1, max_sequences))):
        lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
        for chunk in cut(sequence, *(2 * n for n in lengths)):
            if draw(st.booleans()):
                sequence += 1
                short = Slice(1000 + sequence, 0, 2 * draw(st.integers(1, 20)), True)
                chunk = Chunk((*chunk.slices, short))
            chunks.append(chunk)
        sequence += 1
    memory = MemoryModel(tiny_model(layers), layout, loss_block_tokens=8)
    return tuple(chunks), memory
