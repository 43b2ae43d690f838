"""Ulysses groups of any degree under ZeRO-3 over all devices: time and memory of a micro-batch.

Shared by DeepSpeed and FlexSP. Parameters are gathered hierarchically: a node takes what other
nodes hold through its adapter once per layer and pass, and shares it over its links. Groups wider
than a node exchange through the adapters, shared by the node's devices.

Coarse: gathers and gradient reduce-scatters hide under compute as well as inside a stage
(`zero_overlap`), those between nodes too, while of our replicas' sum of gradients what outlasts the
last backward counts; collectives have no skew and the allocator no cost. So both systems are
flattered. Where the degree does not divide the heads, the rank with most of them counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.baselines.result import Workload
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.links import gather_s
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import Layout, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.time import CostModel, analytic_coefficients

__all__ = ["GroupModel", "group_model", "paper_recompute_layers", "powers_of_two"]

Floats = NDArray[np.float64]

_LARGE_MODEL_PARAMS = 20e9
_MOST_TOKENS = 2**34


@dataclass(frozen=True)
class GroupModel:
    """A group of `degree` ranks that holds the whole model's layers, `recompute` of them redone."""

    degree: int
    recompute: int
    cost: CostModel
    memory: MemoryModel
    static_bytes: int
    num_layers: int

    def times(self, tokens: Floats, areas: Floats) -> Floats:
        """Forward and backward of micro-batches, loss and recomputation included, seconds."""
        tokens = np.ceil(tokens / self.degree) * self.degree
        loss_s = 3 * self.cost.coefficients.logits_s * tokens
        return self.cost.total_times(tokens, areas) + loss_s + self.recompute_times(tokens, areas)

    def recompute_times(self, tokens: Floats, areas: Floats) -> Floats:
        return self.recompute * self.cost.recompute_times(tokens, areas)

    def communication_times(self, tokens: Floats, areas: Floats) -> Floats:
        return self.num_layers * self.cost.communication_times(tokens, areas)

    def peak_bytes(self, tokens: int) -> int:
        """Of a micro-batch of whole sequences with so many tokens; it is alone on the device."""
        chunk = Chunk((Slice(0, 0, max(1, tokens), True),), -max(1, tokens) % self.degree)
        held = self.memory.held_bytes(0, chunk, self.recompute)
        forward = self.memory.forward_transient(0, chunk, self.recompute)
        backward = self.memory.backward_transient(0, chunk, self.recompute)
        return self.static_bytes + held + max(forward, backward)

    def token_capacity(self, limit_bytes: int) -> int:
        """Most tokens of a micro-batch that fit; 0 where not even one does."""
        low, high = 0, 1
        while high < _MOST_TOKENS and self.peak_bytes(high) <= limit_bytes:
            low, high = high, 2 * high
        while low + 1 < high:
            middle = (low + high) // 2
            if self.peak_bytes(middle) <= limit_bytes:
                low = middle
            else:
                high = middle
        return low


def group_model(workload: Workload, degree: int, recompute: int) -> GroupModel | None:
    """The model of one degree; None where the heads cannot be shared by so many ranks."""
    model, cluster = workload.setup.model, workload.setup.cluster
    try:
        layout = make_layout(model, 1, degree)
    except ConfigError:
        return None
    setup = replace(workload.setup, layout=layout).run_with(zero_stage=3)
    layer_bytes = setup.execution.dtype_bytes * model.layer_params
    coefficients = replace(
        analytic_coefficients(setup),
        gather_s=gather_s(layer_bytes, workload.num_devices, cluster),
    )
    # only the shards' number matters for the states, so heads need not be shareable by all devices
    everywhere = Layout(1, workload.num_devices, 1, layout.stage_layers)
    states = MemoryModel(replace(setup, layout=everywhere))
    return GroupModel(
        degree,
        recompute,
        CostModel(setup, coefficients=coefficients),
        MemoryModel(setup),
        states.static_bytes[0],
        model.num_layers,
    )


def paper_recompute_layers(model: ModelSpec) -> int:
    """What the paper sets for DeepSpeed and FlexSP (V-A): 36 of 60 layers for 30B, else none."""
    params = model.num_layers * model.layer_params + 2 * model.embedding_params
    return round(0.6 * model.num_layers) if params > _LARGE_MODEL_PARAMS else 0


def powers_of_two(most: int) -> Sequence[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
