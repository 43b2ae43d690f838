"""Bytes of a stage's parameters, gradients and optimizer on one rank (M_ms, Eq. 6)."""

from __future__ import annotations

from itertools import pairwise

from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import Setup

__all__ = ["gathered_bytes", "reduce_bucket_elements", "state_bytes"]

_MOST_BUCKET_ELEMENTS = 50_000_000


def _stage_units(setup: Setup, stage: int) -> list[int]:
    """Parameters of a stage's layers, the embedding before and the head after them.

    Tied weights on different stages are two copies.
    """
    model, layout = setup.model, setup.layout
    units = [model.layer_params] * layout.stage_layers[stage]
    if stage == 0:
        units.insert(0, model.embedding_params)
    if stage == layout.pp - 1 and not (model.tied_embeddings and layout.pp == 1):
        units.append(model.embedding_params)
    return units


def state_bytes(setup: Setup, stage: int) -> int:
    """What is there between steps (M_ms): parameters, gradients, masters, Adam's moments.

    ZeRO-3 shards all of it over sp, has float32 masters even of float32 parameters, and a bucket
    for gradients that are to be reduced; an offloaded optimizer leaves the parameters and the
    bucket on the device. Masters and moments may be cut over dp as well.
    """
    execution, layout = setup.execution, setup.layout
    size, wide = execution.dtype_bytes, max(4, execution.dtype_bytes)
    parameters = sum(_stage_units(setup, stage))
    if execution.zero_stage == 0:
        return parameters * (size + wide + 2 * wide + (4 if size < 4 else 0))
    shards = layout.sp * (layout.dp if execution.shards_optimizer_over_dp else 1)
    on_device = not execution.offloads_optimizer
    kept = -(-parameters * (size + 4 * on_device) // layout.sp)
    stepped = -(-parameters * (4 + 8) * on_device // shards)
    return kept + stepped + size * reduce_bucket_elements(setup.model)


def reduce_bucket_elements(model: ModelSpec) -> int:
    """Gradients that ZeRO-3 collects before it reduces them; DeepSpeed's `reduce_bucket_size`."""
    return min(_MOST_BUCKET_ELEMENTS, model.layer_params)


def gathered_bytes(setup: Setup, stage: int) -> int:
    """ZeRO-3 at work: parameters gathered from the other ranks, of two layers at a time or of all
    that a stage keeps until the end of the step.
    """
    if not setup.gathers_parameters:
        return 0
    units = _stage_units(setup, stage)
    at_a_time = max((a + b for a, b in pairwise(units)), default=units[0])
    execution = setup.execution
    return execution.dtype_bytes * (sum(units) if execution.keeps_gathered else at_a_time)
