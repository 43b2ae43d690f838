"""Floating-point operations of a plan, from what is really computed: causal, slice by slice."""

from __future__ import annotations

from dataclasses import dataclass

from ds_infinipipe.planner.specs import ModelSpec
from ds_infinipipe.planner.types import Chunk, Plan

__all__ = ["StepFlops", "attended_pairs", "step_flops"]


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Operations of one step over all ranks. `model` is what training the batch takes at least;
    `recompute` comes on top and counts for hardware utilisation only. Padding is in neither."""

    model: float
    recompute: float


def attended_pairs(chunk: Chunk, window: int = 0) -> int:
    """(query, key) pairs of a chunk: token t of a sequence sees t + 1 keys, `window` at most."""
    return sum(_pairs(s.end, window) - _pairs(s.start, window) for s in chunk.slices)


def _pairs(tokens: int, window: int) -> int:
    """Of the first `tokens` tokens of a sequence; no window is 0."""
    rising = min(tokens, window) if window else tokens
    return rising * (rising + 1) // 2 + (tokens - rising) * window


def step_flops(plan: Plan) -> StepFlops:
    """Forward once and backward twice of every layer and of the head, plus recomputed forwards.

    A multiply-add is two operations. Norms, rotary and activations are left out, as is usual.
    """
    forward = {k: _layer_flops(plan.model, chunk) for k, chunk in enumerate(plan.chunks)}
    head = 2.0 * plan.num_tokens * plan.model.embedding_params
    model = 3.0 * (plan.model.num_layers * sum(forward.values()) + head)
    recompute = sum(
        layers * forward[chunk]
        for pipeline in plan.pipelines
        for stage in pipeline.recompute
        for chunk, layers in zip(pipeline.forward, stage, strict=True)
    )
    return StepFlops(model, recompute)


def _layer_flops(model: ModelSpec, chunk: Chunk) -> float:
    linear = 2.0 * chunk.tokens * model.layer_params
    pairs = float(attended_pairs(chunk))
    if model.window_layers:
        # the mean over the layers, as recomputed ones are counted and not named
        share = model.window_layers / model.num_layers
        pairs += share * (attended_pairs(chunk, model.sliding_window) - pairs)
    return linear + 4.0 * model.query_size * pairs
