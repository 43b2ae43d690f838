"""Time of chunks: the analytic cost model (Eq. 1-4 and 11, corrected).

Times are seconds on one rank of a stage; `tokens` counts all tokens of a chunk, over all sp ranks,
and `area` is the quadratic term of Eq. 1, (C + s0)^2 - C^2 + sum of s^2; see area.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.facts.links import all2all_s, gather_s, p2p_token_s
from ds_infinipipe.planner.facts.models import ModelSpec, local_heads, local_kv_heads
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.area import AttentionArea, chunk_sizes

__all__ = [
    "ChunkCosts",
    "CostCoefficients",
    "CostModel",
    "StepFlops",
    "all2alls_per_pass",
    "analytic_coefficients",
    "attended_pairs",
    "attention_backward_flops",
    "step_flops",
]

Floats = NDArray[np.float64]
_ATTENTION_BACKWARD_FLOPS = 2.5  # times the forward's: flash attention recomputes the scores
_WEIGHT_OVERHEAD = 0.5  # of a forward's fixed cost: seven kernels and sums of about thirty


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """Seconds of one decoder layer; the paper's alpha and beta, forward and backward apart.

    Deviation: the paper has one alpha and one beta for both passes.
    """

    linear_s: float
    """alpha_2 / d_s: per token, forward; the backward takes twice as long."""
    attention_forward_s: float
    """alpha_1 / d_s: per unit of area."""
    attention_backward_s: float
    all2all_s: float
    """Per token, all all-to-alls of one pass."""
    overhead_forward_s: float
    """beta_1: per chunk."""
    overhead_backward_s: float
    latency_s: float
    """Latency of the all-to-alls of one pass, per chunk."""
    gather_s: float
    """One ZeRO-3 all-gather of the layer; the backward has two (gather, reduce-scatter)."""
    gather_overlap: float
    """Share of a gather that hides under compute, 0 to 1."""
    logits_s: float
    """Per token, forward: the language-model head. Loss forward and backward take three times."""


@dataclass(frozen=True)
class ChunkCosts:
    """Times of n chunks, seconds; recompute is per layer, p2p per hop between two stages."""

    forward_s: Floats
    """[pp, n]; the last stage's has the loss, forward and backward."""
    backward_s: Floats
    """[pp, n], without recompute."""
    recompute_s: Floats
    """[n], of one layer."""
    p2p_s: Floats
    """[n]"""
    input_s: Floats | None = None
    """[pp, n], the gradient of the input alone (I), without recompute; None where none is split."""
    weight_s: Floats | None = None
    """[pp, n], the gradients of the weights alone (W)."""


def attention_backward_flops(forward_flops: float) -> float:
    """Operations of attention's backward, given those of its forward."""
    return _ATTENTION_BACKWARD_FLOPS * forward_flops


def all2alls_per_pass(setup: Setup) -> int:
    """All-to-alls of one forward, or one backward, of a layer: of q, k and v, and of the output."""
    if setup.layout.sp == 1:
        return 0
    return 2 if setup.execution.joins_qkv else 4


def analytic_coefficients(setup: Setup) -> CostCoefficients:
    """Coefficients from FLOPs and bytes over the cluster's rates, heads padded as executed.

    Deviation: Eq. 3 leaves out the share (sp - 1) / sp of an all-to-all that leaves the rank.
    """
    model, cluster, sp = setup.model, setup.cluster, setup.layout.sp
    dtype_bytes = setup.execution.dtype_bytes
    linear_rate = cluster.peak_flops * cluster.linear_efficiency * sp
    query_width = sp * local_heads(model, sp) * model.head_dim
    kv_width = sp * local_kv_heads(model, sp) * model.head_dim
    area_flops = 2 * query_width
    all2all_bytes = dtype_bytes * (2 * query_width + 2 * kv_width) / sp
    layer_bytes = dtype_bytes * model.layer_params
    forward_rate = cluster.peak_flops * cluster.attention_forward_efficiency * sp
    backward_rate = cluster.peak_flops * cluster.attention_backward_efficiency * sp
    return CostCoefficients(
        linear_s=2 * model.layer_params / linear_rate,
        attention_forward_s=area_flops / forward_rate,
        attention_backward_s=attention_backward_flops(area_flops) / backward_rate,
        all2all_s=all2all_s(all2all_bytes, sp, cluster),
        overhead_forward_s=cluster.layer_overhead_forward_s,
        overhead_backward_s=cluster.layer_overhead_backward_s,
        latency_s=all2alls_per_pass(setup) * cluster.collective_latency_s,
        gather_s=gather_s(layer_bytes, sp, cluster) if setup.execution.zero_stage == 3 else 0.0,
        gather_overlap=cluster.zero_overlap,
        logits_s=2 * model.embedding_params / linear_rate,
    )


class CostModel:
    """Predicts chunk times for one setup. Cheap to make; hand it on where several need it."""

    def __init__(self, setup: Setup, *, coefficients: CostCoefficients | None = None) -> None:
        """`coefficients` replaces the analytic ones. Where the setup keeps parameters gathered only
        a step's first forward gathers; its wait is shared out among the chunks.
        """
        self.layout = setup.layout
        self.area = AttentionArea.of(setup.model)
        self.coefficients = coefficients or analytic_coefficients(setup)
        self.keeps_gathered = setup.execution.keeps_gathered
        self.mean_layers = setup.model.num_layers / setup.layout.pp
        self._p2p_token_s = p2p_token_s(setup)
        self._p2p_latency_s = setup.cluster.p2p_latency_s

    @property
    def mesh_coefficients(self) -> tuple[float, float]:
        """(a, b) of one layer's backward work a A(x) + b x, which the slice mesh balances."""
        c = self.coefficients
        return c.attention_backward_s, 2 * c.linear_s + c.all2all_s

    def total_time(self, tokens: float, area: float) -> float:
        """T_tot (Eq. 4): forward and backward of the average stage, without the loss.

        A chunk's time is never a sum of its parts' times: each has the fixed cost once.
        """
        return float(self.total_times(np.asarray(tokens, float), np.asarray(area, float)))

    def backward_time(self, tokens: float, area: float) -> float:
        """Backward part of `total_time`."""
        times = self._layer_backward(np.asarray(tokens, float), np.asarray(area, float))
        return float(self.mean_layers * times)

    def total_times(self, tokens: Floats, areas: Floats) -> Floats:
        """`total_time` of many chunks at once."""
        both = self._layer_forward(tokens, areas) + self._layer_backward(tokens, areas)
        return np.asarray(self.mean_layers * both)

    def chunk_costs(self, chunks: Sequence[Chunk]) -> ChunkCosts:
        """Times of each chunk on each stage (Eq. 1-4) and of one recomputed layer (Eq. 11).

        Padding counts: it is computed like any other segment.
        Deviation: the loss runs forward and backward inside the last stage's F, so F has three
        times the head's forward and B none. Eq. 11 reads l * d_p / L, not l / (L * d_s): T_tot is
        the time of one stage already.
        """
        return self.size_costs(*self.sizes(chunks))

    def sizes(self, chunks: Sequence[Chunk]) -> tuple[Floats, Floats]:
        """Tokens and areas of chunks, padding included; [n]."""
        return chunk_sizes(chunks, self.area)

    def size_costs(self, tokens: Floats, areas: Floats) -> ChunkCosts:
        """`chunk_costs` of chunks known by their sizes alone, padding included; arrays [n]."""
        layers = np.array(self.layout.stage_layers, dtype=np.float64)[:, None]
        layer_s = self._layer_forward(tokens, areas)
        if self.keeps_gathered:
            layer_s = layer_s + self._gather_wait(tokens, areas) / max(1, tokens.size)
        forward = layers * layer_s[None, :]
        forward[-1] += 3 * self.coefficients.logits_s * tokens
        return ChunkCosts(
            forward_s=forward,
            backward_s=layers * self._layer_backward(tokens, areas)[None, :],
            recompute_s=self.recompute_times(tokens, areas),
            p2p_s=self._p2p_token_s * tokens + self._p2p_latency_s,
            input_s=layers * self._layer_input(tokens, areas)[None, :],
            weight_s=layers * self._layer_weight(tokens)[None, :],
        )

    def recompute_times(self, tokens: Floats, areas: Floats) -> Floats:
        """One recomputed layer (Eq. 11).

        The backward's own gather serves the recomputation; the all-to-alls are repeated.
        """
        return self._forward_compute(tokens, areas) + self._all2all(tokens)

    def communication_times(self, tokens: Floats, areas: Floats) -> Floats:
        """Share of one layer's forward and backward in which it waits for gathers and all-to-alls.

        What hides under compute does not count, nor do the all-to-alls of a recomputation.
        """
        both = self._layer_forward(tokens, areas) + self._layer_backward(tokens, areas)
        compute = self._forward_compute(tokens, areas) + self._backward_compute(tokens, areas)
        return both - compute

    def split_times(self, tokens: Floats, areas: Floats) -> Floats:
        """What I and W of one layer wait longer for gathers than its B does."""
        halves = self._layer_input(tokens, areas) + self._layer_weight(tokens)
        whole = self._layer_backward(tokens, areas) + self._weight_overhead_s
        return np.asarray(halves - whole)

    def _forward_compute(self, tokens: Floats, areas: Floats) -> Floats:
        c = self.coefficients
        return c.linear_s * tokens + c.attention_forward_s * areas + c.overhead_forward_s

    def _backward_compute(self, tokens: Floats, areas: Floats) -> Floats:
        c = self.coefficients
        return 2 * c.linear_s * tokens + c.attention_backward_s * areas + c.overhead_backward_s

    def _all2all(self, tokens: Floats) -> Floats:
        return self.coefficients.all2all_s * tokens + self.coefficients.latency_s

    @property
    def _gather_s(self) -> float:
        """Of one layer before a pass through it."""
        return 0.0 if self.keeps_gathered else self.coefficients.gather_s

    def _gather_wait(self, tokens: Floats, areas: Floats) -> Floats:
        """What a layer's gather adds to its forward."""
        compute = self._forward_compute(tokens, areas)
        return self._with_gather(compute, self.coefficients.gather_s) - compute

    def _layer_forward(self, tokens: Floats, areas: Floats) -> Floats:
        compute = self._forward_compute(tokens, areas)
        return self._with_gather(compute, self._gather_s) + self._all2all(tokens)

    def _layer_backward(self, tokens: Floats, areas: Floats) -> Floats:
        compute = self._backward_compute(tokens, areas)
        both_s = self._gather_s + self.coefficients.gather_s
        return self._with_gather(compute, both_s) + self._all2all(tokens)

    def _layer_input(self, tokens: Floats, areas: Floats) -> Floats:
        """I: the backward but for the weights' half of the linear work; it gathers the layer."""
        compute = self._backward_compute(tokens, areas) - self.coefficients.linear_s * tokens
        return self._with_gather(compute, self._gather_s) + self._all2all(tokens)

    def _layer_weight(self, tokens: Floats) -> Floats:
        """W: the other half, and the reduce-scatter; the fixed cost is on top of the backward's."""
        compute = self.coefficients.linear_s * tokens + self._weight_overhead_s
        return self._with_gather(compute, self.coefficients.gather_s)

    @property
    def _weight_overhead_s(self) -> float:
        return _WEIGHT_OVERHEAD * self.coefficients.overhead_forward_s

    def _with_gather(self, compute: Floats, gather_s: float) -> Floats:
        hidden = self.coefficients.gather_overlap * np.minimum(compute, gather_s)
        return np.asarray(compute + gather_s - hidden)


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
    """Of the first `tokens` tokens of a sequence; no window is 0.

    An area is twice as many, less one for each token up to the window's length.
    """
    rising = min(tokens, window) if window else tokens
    return (AttentionArea(window, 1, 1).before(tokens) + rising) // 2


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
