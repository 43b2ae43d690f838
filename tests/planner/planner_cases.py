"""Small models and batches for the tests of rows, recomputation, grouping and search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS, ClusterSpec
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSection
from ds_infinipipe.planner.facts.setup import Execution, Layout, Setup, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.ledger import Ledger
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.rows import PipelineMemory, pipeline_memory
from ds_infinipipe.planner.search.batch import plan_batch

CLUSTER = replace(BUILTIN_CLUSTERS["cpu-local"], memory_bytes=2**30)
PLAIN_FLOAT32 = Execution(dtype_bytes=4, fused_kernels=False)


def setup_of(
    model: ModelSpec,
    layout: Layout,
    cluster: ClusterSpec = CLUSTER,
    execution: Execution | None = None,
    limit_bytes: int | None = None,
    alignment: int = 1,
    **changes: Any,
) -> Setup:
    """A setup within the cluster's memory; fused bf16 layers under ZeRO-3 but for `changes`."""
    limit_bytes = cluster.memory_bytes if limit_bytes is None else limit_bytes
    execution = replace(execution or Execution(), **changes)
    return Setup(model, cluster, layout, execution, limit_bytes, alignment)


def tiny_setup(num_layers: int, pp: int, sp: int = 1, **changes: Any) -> Setup:
    """Plain float32 layers of the tiny model in even stages."""
    model = tiny_model(num_layers)
    return setup_of(model, make_layout(model, pp, sp), execution=PLAIN_FLOAT32, **changes)


def plan_with(
    lengths: Sequence[int],
    model: ModelSpec,
    layout: Layout,
    cluster: ClusterSpec = CLUSTER,
    execution: Execution | None = None,
    **knobs: Any,
) -> Plan:
    """The plan under these keys of the configuration's `planner` section."""
    section = PlannerSection.model_validate(knobs)
    setup = section.setup(model, cluster, layout, execution or Execution())
    return plan_batch(lengths, setup, section.settings)


def tiny_model(num_layers: int) -> ModelSpec:
    return ModelSpec("tiny", num_layers, 32, 64, 4, 2, 8, 128)


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
    chosen = range(len(chunks)) if members is None else members
    return pipeline_memory(Ledger(memory, chunks), chosen)


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
    setup = setup_of(tiny_model(layers), layout, execution=PLAIN_FLOAT32, loss_block_tokens=8)
    return tuple(chunks), MemoryModel(setup)
