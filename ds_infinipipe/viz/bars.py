"""What a drawn F or B says and how it is coloured, the same in pictures and in pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.types import ChunkKind, Op, Plan, Span, Timeline

__all__ = ["COLORS", "RECOMPUTE_COLORS", "Bar", "timeline_bars", "timeline_title"]

# by kind and direction: one hue a kind, tellable by colour-blind eyes; B is the darker one
COLORS: Mapping[tuple[ChunkKind, Op], str] = {
    (ChunkKind.SPLIT, Op.FORWARD): "#9ecae1",
    (ChunkKind.SPLIT, Op.BACKWARD): "#3182bd",
    (ChunkKind.HYBRID, Op.FORWARD): "#a8ddb5",
    (ChunkKind.HYBRID, Op.BACKWARD): "#2e9e5b",
    (ChunkKind.BATCHED, Op.FORWARD): "#fdd0a2",
    (ChunkKind.BATCHED, Op.BACKWARD): "#e6842a",
}

RECOMPUTE_COLORS: Mapping[ChunkKind, str] = {
    ChunkKind.SPLIT: "#08306b",
    ChunkKind.HYBRID: "#00441b",
    ChunkKind.BATCHED: "#7f2704",
}


@dataclass(frozen=True)
class Bar:
    """A span with what its chunk is; `recompute_share` is the part of a B that recomputes."""

    span: Span
    kind: ChunkKind
    tokens: int
    padding: int
    context: int
    num_sequences: int
    recompute: int
    layers: int
    recompute_share: float

    @property
    def label(self) -> str:
        return f"{self.span.op.value}{self.span.chunk}"

    @property
    def description(self) -> str:
        """Three or four lines: instruction, chunk, times, recomputed layers."""
        span = self.span
        padding = f" and {self.padding:,} of padding" if self.padding else ""
        context = f", context {self.context:,}" if self.context else ""
        lines = [
            f"{self.label} on stage {span.stage}",
            f"chunk {span.chunk}, {self.kind.value}: {self.tokens:,} tokens{padding} of "
            f"{self.num_sequences} sequence{'' if self.num_sequences == 1 else 's'}{context}",
            f"{span.start_s:.4g} s to {span.end_s:.4g} s, {span.end_s - span.start_s:.4g} s",
        ]
        if self.recompute:
            lines.append(f"{self.recompute} of {self.layers} layers recomputed")
        return "\n".join(lines)


def timeline_bars(timeline: Timeline, plan: Plan) -> tuple[Bar, ...]:
    """One bar per span, in the timeline's order.

    The recomputed share of a B is the predicted one, for a measured timeline too: recomputation
    runs layer by layer between the gradients, and no clock stops it apart.
    """
    counts = {
        (stage, i.chunk): i.recompute
        for stage, stream in enumerate(plan.streams)
        for i in stream
        if i.op is Op.FORWARD
    }
    shares = _recompute_shares(plan, counts)
    bars = []
    for span in timeline.spans:
        chunk, place = plan.chunks[span.chunk], (span.stage, span.chunk)
        share = float(shares[place]) if span.op is Op.BACKWARD else 0.0
        bars.append(
            Bar(
                span,
                chunk.kind,
                chunk.tokens,
                chunk.padding,
                chunk.context_len,
                len(chunk.slices),
                counts[place],
                plan.layout.stage_layers[span.stage],
                share,
            )
        )
    return tuple(bars)


def timeline_title(name: str, timeline: Timeline) -> str:
    return f"{name}: {timeline.makespan_s:.4g} s, bubbles {timeline.bubble_ratio:.1%}"


def _recompute_shares(plan: Plan, counts: Mapping[tuple[int, int], int]) -> NDArray[np.float64]:
    """[stage, chunk]: recompute time over all time of the B."""
    costs = CostModel(plan.model, plan.cluster, plan.layout, plan.zero_stage).chunk_costs(
        plan.chunks
    )
    layers = np.zeros((plan.layout.pp, len(plan.chunks)))
    for (stage, chunk), count in counts.items():
        layers[stage, chunk] = count
    recompute_s = layers * costs.recompute_s
    return np.asarray(recompute_s / (costs.backward_s + recompute_s))
