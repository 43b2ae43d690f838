"""What a drawn F, B, I or W says and how it is coloured, the same in pictures and in pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.plan.chunks import ChunkKind
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op, Span, Timeline
from ds_infinipipe.planner.predict.time import CostModel

__all__ = ["COLORS", "LEGEND", "RECOMPUTE_COLORS", "Bar", "timeline_bars", "timeline_title"]

_WEIGHT_COLOR = "#c994c7"
# one hue a kind, tellable by colour-blind eyes; the backward is the darker one
_KIND_COLORS: Mapping[ChunkKind, tuple[str, str]] = {
    ChunkKind.SPLIT: ("#9ecae1", "#3182bd"),
    ChunkKind.HYBRID: ("#a8ddb5", "#2e9e5b"),
    ChunkKind.BATCHED: ("#fdd0a2", "#e6842a"),
}

COLORS: Mapping[tuple[ChunkKind, Op], str] = {
    (kind, op): color
    for kind, (light, dark) in _KIND_COLORS.items()
    for op, color in (
        (Op.FORWARD, light),
        (Op.BACKWARD, dark),
        (Op.BACKWARD_INPUT, dark),
        (Op.BACKWARD_WEIGHT, _WEIGHT_COLOR),
    )
}

LEGEND: Mapping[str, str] = {
    **{
        f"{kind.value}, {word}": color
        for kind, colors in _KIND_COLORS.items()
        for word, color in zip(("forward", "backward"), colors, strict=True)
    },
    "weight gradients": _WEIGHT_COLOR,
}
"""Colours by what they say; a backward split in two has its first half's."""

RECOMPUTE_COLORS: Mapping[ChunkKind, str] = {
    ChunkKind.SPLIT: "#08306b",
    ChunkKind.HYBRID: "#00441b",
    ChunkKind.BATCHED: "#7f2704",
}


@dataclass(frozen=True)
class Bar:
    """A span with what its chunk is; `recompute_share` is the part of a B or I that recomputes."""

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

    The recomputed share of a B or I is the predicted one, for a measured timeline too:
    recomputation runs layer by layer between the gradients, and no clock stops it apart.
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
        share = float(shares[span.op][place]) if span.op in shares else 0.0
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


def _recompute_shares(
    plan: Plan, counts: Mapping[tuple[int, int], int]
) -> Mapping[Op, NDArray[np.float64]]:
    """[stage, chunk]: recompute time over all time of the B, and of the I."""
    costs = CostModel(plan.setup).chunk_costs(plan.chunks)
    layers = np.zeros((plan.layout.pp, len(plan.chunks)))
    for (stage, chunk), count in counts.items():
        layers[stage, chunk] = count
    recompute_s = layers * costs.recompute_s
    assert costs.input_s is not None
    times = {Op.BACKWARD: costs.backward_s, Op.BACKWARD_INPUT: costs.input_s}
    return {op: recompute_s / (own_s + recompute_s) for op, own_s in times.items()}
