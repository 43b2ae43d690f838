"""Bytes of a stage's parameters, gradients and optimizer on one rank (M_ms, Eq. 6)."""

from __future__ import annotations

from itertools import pairwise

from ds_infinipipe.planner.specs import Layout, ModelSpec

__all__ = ["can_keep_gathered", "gathered_bytes", "reduce_bucket_elements", "state_bytes"]

_MOST_BUCKET_ELEMENTS = 50_000_000


def _stage_units(model: ModelSpec, layout: Layout, stage: int) -> list[int]:
    """Parameters of a stage's layers, the embedding before and the head after them.

    Tied weights on different stages are two copies.
    """
    units = [model.layer_params] * layout.stage_layers[stage]
    if stage == 0:
        units.insert(0, model.embedding_params)
    if stage == layout.pp - 1 and not (model.tied_embeddings and layout.pp == 1):
        units.append(model.embedding_params)
    return units


def state_bytes(model: ModelSpec, layout: Layout, stage: int, zero_stage: int) -> int:
    """What is there between steps (M_ms): parameters, gradients, masters, Adam's moments.

    ZeRO-3 shards all of it over sp, has float32 masters even of float32 parameters, and a bucket
    for gradients that are to be reduced; an offloaded optimizer leaves the parameters and the
    bucket on the device. Masters and moments may be cut over dp as well.
    """
    size, wide = model.dtype_bytes, max(4, model.dtype_bytes)
    parameters = sum(_stage_units(model, layout, stage))
    if zero_stage == 0:
        return parameters * (size + wide + 2 * wide + (4 if size < 4 else 0))
    shards = layout.sp * (layout.dp if model.shards_optimizer_over_dp else 1)
    on_device = not model.offloads_optimizer
    kept = -(-parameters * (size + 4 * on_device) // layout.sp)
    stepped = -(-parameters * (4 + 8) * on_device // shards)
    return kept + stepped + size * reduce_bucket_elements(model)


def reduce_bucket_elements(model: ModelSpec) -> int:
    """Gradients that ZeRO-3 collects before it reduces them; DeepSpeed's `reduce_bucket_size`."""
    return min(_MOST_BUCKET_ELEMENTS, model.layer_params)


def can_keep_gathered(layout: Layout, zero_stage: int) -> bool:
    """True where parameters are gathered at all: ZeRO-3 over several ranks of a stage."""
    return zero_stage == 3 and layout.sp > 1


def gathered_bytes(
    model: ModelSpec, layout: Layout, stage: int, zero_stage: int, keeps_gathered: bool = False
) -> int:
    """ZeRO-3 at work: parameters gathered from the other ranks, of two layers at a time or of all
    that a stage keeps until the end of the step.
    """
    if not can_keep_gathered(layout, zero_stage):
        return 0
    units = _stage_units(model, layout, stage)
    at_a_time = max((a + b for a, b in pairwise(units)), default=units[0])
    return model.dtype_bytes * (sum(units) if keeps_gathered else at_a_time)
