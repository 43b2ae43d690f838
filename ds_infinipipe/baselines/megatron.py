"""Megatron-LM: tensor, context, pipeline and data parallelism over whole sequences.

Linear layers and attention are shared by tp x cp ranks; the norms' inputs by tp (its sequence
parallelism), so activations too are shared by all. A layer's pass has four collectives over tp of
the hidden states, which nothing hides. Ring attention hands K and V on cp - 1 times (and their
gradients in backward); with tp filling a node all of it goes through the node's adapter, hidden
under attention only. ZeRO-1: optimizer states over dp x cp, gradients reduced once a step.

Coarse: one adapter carries the whole ring and hides under nothing but attention, which is
pessimistic; the causal ring is perfectly balanced and micro-batches are best-fit packed, which is
optimistic. Heads that tp does not divide are padded, which the original refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.baselines.groups import powers_of_two
from ds_infinipipe.baselines.packing import fixed_chunks
from ds_infinipipe.baselines.pipeline import PipelineCase, PipelineRun, combine_replicas
from ds_infinipipe.baselines.result import (
    PAPER,
    TUNED,
    BaselineResult,
    Workload,
    fastest,
    infeasible,
)
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import Layout, Setup, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.area import AttentionArea, chunk_sizes
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel, analytic_coefficients
from ds_infinipipe.planner.search.replicas import split_batch

__all__ = ["Degrees", "megatron"]

NAME = "Megatron-LM"
_GIB = 2**30
_COLLECTIVES = 4
_PAPER_TP = 8
_SMALL_MODEL_PARAMS, _MIDDLE_MODEL_PARAMS = 10e9, 20e9
_CAPACITY_FACTORS = (1.0, 1.5, 2.0, 3.0)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Degrees:
    """How the devices are shared out."""

    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def num_devices(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self) -> str:
        return f"TP {self.tp}, CP {self.cp}, PP {self.pp}, DP {self.dp}"


def megatron(workload: Workload) -> tuple[BaselineResult, ...]:
    """The paper's degrees and checkpointing (V-A), then the best of all degrees.

    Paper: TP 8, CP 2 (7B) or 4, the rest data-parallel; 10 of 32, 20 of 40 or 55 of 60 layers.
    """
    paper = _paper(workload)
    results = [
        _run(workload, TUNED, degrees, None, factor)
        for degrees in _all_degrees(workload)
        for factor in _CAPACITY_FACTORS
    ]
    return (paper, fastest([*results, replace(paper, configuration=TUNED)]))


def _paper(workload: Workload) -> BaselineResult:
    model, devices = workload.setup.model, workload.num_devices
    params = model.num_layers * model.layer_params + 2 * model.embedding_params
    if params < _SMALL_MODEL_PARAMS:
        cp, share = 2, 10 / 32
    else:
        cp, share = 4, 20 / 40 if params < _MIDDLE_MODEL_PARAMS else 55 / 60
    tp = math.gcd(_PAPER_TP, devices)
    cp = math.gcd(cp, devices // tp)
    degrees = Degrees(tp, cp, 1, devices // (tp * cp))
    return _run(workload, PAPER, degrees, round(share * model.num_layers), 1.0)


def _all_degrees(workload: Workload) -> Iterator[Degrees]:
    devices = workload.num_devices
    for tp in powers_of_two(min(workload.setup.cluster.devices_per_node, devices)):
        for cp in powers_of_two(devices // tp):
            for pp in powers_of_two(devices // (tp * cp)):
                if devices % (tp * cp * pp) == 0 and pp <= workload.setup.model.num_layers:
                    yield Degrees(tp, cp, pp, devices // (tp * cp * pp))


class _MegatronMemory(MemoryModel):
    """Activations of a tp rank; states with ZeRO-1 over dp x cp instead of ZeRO-3 over the stage.

    Parameters and gradients 2 and 4 bytes (bf16), master and moments 12 bytes sharded.
    """

    def __init__(self, setup: Setup, degrees: Degrees) -> None:
        super().__init__(setup.run_with(zero_stage=3))
        shards = degrees.dp * degrees.cp
        rank_bytes = (setup.execution.dtype_bytes + 4 + 12 / shards) / degrees.tp
        self.static_bytes = tuple(
            math.ceil(rank_bytes * params) for params in _stage_params(setup.model, setup.layout)
        )


def _stage_params(model: ModelSpec, layout: Layout) -> list[int]:
    params = [layers * model.layer_params for layers in layout.stage_layers]
    params[0] += model.embedding_params
    params[-1] += model.embedding_params
    return params


def _run(
    workload: Workload, configuration: str, degrees: Degrees, layers: int | None, factor: float
) -> BaselineResult:
    model = workload.setup.model
    try:
        layout = make_layout(model, degrees.pp, degrees.tp, degrees.dp)
    except ConfigError as error:
        return infeasible(NAME, configuration, f"{degrees}: {error}")
    setup = replace(workload.setup, layout=layout).run_with(zero_stage=0)
    memory, cost = _MegatronMemory(setup, degrees), CostModel(setup)
    runs: list[PipelineRun] = []
    for share in split_batch(workload.lengths, degrees.dp, cost):
        if not share:
            continue
        unit = degrees.tp * degrees.cp
        size = math.ceil(factor * workload.longest / unit) * unit
        chunks = fixed_chunks([workload.lengths[i] for i in share], size, unit, unit)
        run = _case(setup, degrees, memory, chunks).run(workload.setup.limit_bytes, layers)
        if run is None:
            limit = f"{workload.setup.limit_bytes / _GIB:.2f} GiB"
            return infeasible(NAME, configuration, f"{degrees}: does not fit {limit}")
        runs.append(run)
    reduction_s = _reduction_s(setup, degrees)
    note = f"{degrees}, micro-batches of {size:,}"
    return combine_replicas(NAME, configuration, workload, runs, degrees.dp, reduction_s, note)


def _case(
    setup: Setup, degrees: Degrees, memory: MemoryModel, chunks: tuple[Chunk, ...]
) -> PipelineCase:
    """Times of the chunks; the memory model sees the part of them that one cp rank holds."""
    held = tuple(
        Chunk((Slice(c.slices[0].sequence, 0, c.padded_tokens // degrees.cp, True),))
        for c in chunks
    )
    sizes = chunk_sizes(chunks, AttentionArea.of(setup.model))
    costs, communication_s = _costs(setup, degrees, *sizes)
    return PipelineCase(setup.layout, chunks, costs, communication_s, memory, held)


def _costs(
    setup: Setup, degrees: Degrees, tokens: Floats, areas: Floats
) -> tuple[ChunkCosts, Floats]:
    model, cluster, size = setup.model, setup.cluster, setup.execution.dtype_bytes
    c = analytic_coefficients(setup)
    cp, tp = degrees.cp, degrees.tp
    gather_share = (tp - 1) / tp / cluster.gather_bandwidth
    collectives_s = _COLLECTIVES * gather_share * size * model.hidden_size * tokens / cp
    latency_s = _COLLECTIVES * cluster.collective_latency_s if tp > 1 else 0.0
    # the tp ranks of a cp rank send its K and V cp - 1 times; one such stream leaves each node
    ring_bytes = 2 * size * model.kv_size * tokens * (cp - 1) / cp
    crosses = tp * cp > cluster.devices_per_node
    link = cluster.node_p2p_bandwidth if crosses else tp * cluster.intra_node_p2p_bandwidth
    ring_s = ring_bytes / link
    attention = c.attention_forward_s * areas / cp, c.attention_backward_s * areas / cp
    linear_s = c.linear_s * tokens / cp
    waits = tuple(
        collectives_s + latency_s + np.maximum(0.0, times * ring_s - busy)
        for times, busy in zip((1, 2), attention, strict=True)
    )
    forward = linear_s + attention[0] + c.overhead_forward_s + waits[0]
    backward = 2 * linear_s + attention[1] + c.overhead_backward_s + waits[1]
    layers = np.array(setup.layout.stage_layers, dtype=np.float64)[:, None]
    forward_s = layers * forward[None, :]
    forward_s[-1] += 3 * c.logits_s * tokens / cp
    token_s = size * model.hidden_size / cluster.node_p2p_bandwidth
    p2p_s = token_s * tokens / cp + cluster.p2p_latency_s
    costs = ChunkCosts(forward_s, layers * backward[None, :], forward, p2p_s)
    return costs, np.asarray(waits[0] + waits[1])


def _reduction_s(setup: Setup, degrees: Degrees) -> float:
    """Gradients scattered, parameters gathered over dp x cp through the adapters, once a step."""
    ranks = degrees.dp * degrees.cp
    if ranks == 1:
        return 0.0
    cluster, size = setup.cluster, setup.execution.dtype_bytes
    rank_bytes = (4 + size) * max(_stage_params(setup.model, setup.layout)) / degrees.tp
    device_nic = cluster.node_p2p_bandwidth / cluster.devices_per_node
    inside = degrees.num_devices <= cluster.devices_per_node
    bandwidth = cluster.gather_bandwidth if inside else device_nic
    return (ranks - 1) / ranks * rank_bytes / bandwidth + 2 * cluster.collective_latency_s
