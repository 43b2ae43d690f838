"""A plan as one HTML file: timelines, memory, recompute map; needs no other file and no network.

Places along the time axis are percentages, so that the zoom slider only changes a width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.plan.chunks import ChunkKind
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Timeline
from ds_infinipipe.viz.bars import (
    COLORS,
    LEGEND,
    RECOMPUTE_COLORS,
    Bar,
    timeline_bars,
    timeline_title,
)
from ds_infinipipe.viz.memory import PARTS, MemoryStep, memory_axis_bytes, memory_over_time
from ds_infinipipe.viz.page_parts import SCRIPT, STYLE, TIME_WIDTH_PX, time_ticks
from ds_infinipipe.viz.recompute_map import recompute_map
from ds_infinipipe.viz.tables import plan_summary

__all__ = ["plan_page", "write_page"]

_GIB = 2**30
_BAR_PX, _ROW_PX, _TITLE_PX = 26, 32, 30
_MEMORY_PX, _MEMORY_ROW_PX = 90, 112
_AXIS_PX = 22
_CHARACTER_PX = 7
_MAP_CELL_PX, _MAP_HEAD_PX = 18, 70


def write_page(path: Path | str, timelines: Mapping[str, Timeline], plan: Plan) -> None:
    """Write `plan_page` to a file; ConfigError where that is not possible."""
    try:
        Path(path).write_text(plan_page(timelines, plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def plan_page(timelines: Mapping[str, Timeline], plan: Plan) -> str:
    """The page as text: the timelines one above the other, then memory and recompute map.

    Memory is drawn over the first timeline. Every F, B, I and W is one element of class "span" with
    data-timeline, data-stage, data-op and data-chunk; its title says what it is.
    """
    end_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0) or 1.0
    canvas = _Canvas(end_s)
    for name, timeline in timelines.items():
        canvas.title(timeline_title(name, timeline))
        _add_timeline(canvas, name, timeline_bars(timeline, plan), plan.layout.pp)
    canvas.axis()
    canvas.title("memory of a rank by stage")
    for stage, steps in enumerate(memory_over_time(plan, next(iter(timelines.values()), None))):
        _add_memory(canvas, stage, steps, plan)
    canvas.axis()
    heading = f"{plan.model.name}, pp {plan.layout.pp}, sp {plan.layout.sp}"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<title>{escape(heading)}</title>",
            f"<style>{STYLE}{_color_rules()}</style>\n</head>\n<body>",
            f"<h1>{escape(heading)}</h1>",
            f"<pre>{escape(plan_summary(plan))}</pre>",
            _legend(),
            canvas.html(),
            "<h2>recomputed layers by stage and chunk, chunks in forward order</h2>",
            _map_html(plan),
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


class _Canvas:
    """Rows from top to bottom: `labels` stay in place, `drawing` scrolls with the time axis."""

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s
        self.height = 0
        self.labels: list[str] = []
        self.drawing: list[str] = []

    def percent(self, time_s: float) -> float:
        return round(100.0 * time_s / self.end_s, 4)

    def title(self, text: str) -> None:
        self.label(text, _TITLE_PX - 8, "title")
        self.height += _TITLE_PX

    def label(self, text: str, below_px: int, kind: str = "label") -> None:
        place = f'x="4" y="{self.height + below_px}"'
        self.labels.append(f'<text class="{kind}" {place}>{escape(text)}</text>')

    def axis(self) -> None:
        for tick_s in time_ticks(self.end_s):
            x, y = self.percent(tick_s), self.height
            self.drawing.append(f'<line class="tick" x1="{x}%" x2="{x}%" y1="{y}" y2="{y + 5}"/>')
            self.drawing.append(f'<text class="tick" x="{x}%" y="{y + 17}">{tick_s:.6g} s</text>')
        self.height += _AXIS_PX

    def html(self) -> str:
        return (
            f'<div class="chart"><svg class="labels" height="{self.height}">'
            f'{"".join(self.labels)}</svg><div class="scroll">'
            f'<svg id="time" width="100%" height="{self.height}">{_hatches()}\n'
            + "\n".join(self.drawing)
            + "</svg></div></div>"
        )


def _add_timeline(canvas: _Canvas, name: str, bars: Sequence[Bar], pp: int) -> None:
    for stage in range(pp):
        canvas.label(f"stage {stage}", stage * _ROW_PX + 18)
    for bar in bars:
        canvas.drawing.append(_bar_svg(canvas, name, bar))
    canvas.height += pp * _ROW_PX


def _bar_svg(canvas: _Canvas, name: str, bar: Bar) -> str:
    span = bar.span
    x, width = canvas.percent(span.start_s), canvas.percent(span.end_s - span.start_s)
    hatch = ""
    if bar.recompute_share:
        share = f'{100 * bar.recompute_share:.2f}%" height="{_BAR_PX}'
        hatch = f'<rect width="{share}" fill="url(#hatch-{bar.kind.value})"/>'
    needed_px = _CHARACTER_PX * len(bar.label) + 2
    hidden = "" if width / 100 * TIME_WIDTH_PX >= needed_px else ' class="hidden"'
    return (
        f'<svg class="span {bar.kind.value} {span.op.value}" x="{x}%" width="{width}%" '
        f'y="{canvas.height + span.stage * _ROW_PX}" height="{_BAR_PX}" '
        f'data-timeline="{escape(name)}" data-stage="{span.stage}" data-op="{span.op.value}" '
        f'data-chunk="{span.chunk}"><title>{escape(bar.description)}</title>'
        f'<rect width="100%" height="{_BAR_PX}"/>{hatch}'
        f'<text x="50%" y="17" data-px="{needed_px}"{hidden}>{bar.label}</text></svg>'
    )


def _add_memory(canvas: _Canvas, stage: int, steps: Sequence[MemoryStep], plan: Plan) -> None:
    top = memory_axis_bytes(plan)
    limit, peak = plan.setup.limit_bytes, plan.predicted.peak_bytes[stage]
    canvas.label(f"stage {stage}", 20)
    canvas.label(f"peak {peak / _GIB:.4g} GiB", 36, "small")
    canvas.label(f"limit {limit / _GIB:.4g} GiB", 50, "small")
    for step in steps:
        canvas.drawing.append(_memory_svg(canvas, step, stage, top))
    if limit <= top:
        y = canvas.height + _MEMORY_PX * (1 - limit / top)
        canvas.drawing.append(f'<line class="limit" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
    canvas.height += _MEMORY_ROW_PX


def _memory_svg(canvas: _Canvas, step: MemoryStep, stage: int, top: float) -> str:
    x, width = canvas.percent(step.start_s), canvas.percent(step.end_s - step.start_s)
    lines = [f"stage {stage} {step.when}: {step.usage.total / _GIB:.4g} GiB"]
    boxes, bottom = [], float(_MEMORY_PX)
    for part, value in zip(PARTS, step.parts, strict=True):
        if not value:
            continue
        lines.append(f"{part.name} {value / _GIB:.4g}")
        height = _MEMORY_PX * value / top
        bottom -= height
        box = f'width="100%" y="{bottom:.2f}" height="{height:.2f}"'
        boxes.append(f'<rect class="{part.field}" {box}/>')
    return (
        f'<svg class="memory" x="{x}%" width="{width}%" y="{canvas.height}" '
        f'height="{_MEMORY_PX}"><title>{escape(chr(10).join(lines))}</title>'
        f"{''.join(boxes)}</svg>"
    )


def _map_html(plan: Plan) -> str:
    """The recompute map as a heat map, darker for more layers."""
    table, layers = recompute_map(plan), plan.layout.stage_layers
    order = [chunk for pipeline in plan.pipelines for chunk in pipeline.forward]
    size, head = _MAP_CELL_PX, _MAP_HEAD_PX
    cells = []
    for stage, counts in enumerate(table):
        y = stage * size
        cells.append(f'<text class="label" x="4" y="{y + 13}">stage {stage}</text>')
        for column, chunk in enumerate(order):
            count = counts[chunk]
            title = f"stage {stage}, chunk {chunk}: {count} of {layers[stage]} layers recomputed"
            x = head + column * size
            light = ' class="light"' if count > 0.55 * layers[stage] else ""
            cells.append(
                f'<g class="cell" data-stage="{stage}" data-chunk="{chunk}" data-layers="{count}">'
                f'<title>{title}</title><rect x="{x}" y="{y}" width="{size - 1}" '
                f'height="{size - 1}" fill-opacity="{0.06 + 0.94 * count / layers[stage]:.2f}"/>'
                f'<text x="{x + (size - 1) / 2}" y="{y + 13}"'
                f"{light}>{count or ''}</text></g>"
            )
    width, height = head + len(order) * size, len(table) * size
    return (
        f'<div class="scroll"><svg width="{width}" height="{height}">{"".join(cells)}</svg></div>'
    )


def _legend() -> str:
    entries = [
        f'<span><i style="background:{color}"></i>{label}</span>' for label, color in LEGEND.items()
    ]
    entries += [f'<span><i style="background:{p.color}"></i>{p.name}</span>' for p in PARTS]
    return (
        '<p class="legend">zoom <input id="zoom" type="range" min="0" max="6" step="0.1" '
        f'value="0"> {"".join(entries)} hatched: recomputation (its share of the backward)</p>'
    )


def _hatches() -> str:
    return "<defs>" + "".join(_hatch(kind) for kind in ChunkKind) + "</defs>"


def _hatch(kind: ChunkKind) -> str:
    color = RECOMPUTE_COLORS[kind]
    return (
        f'<pattern id="hatch-{kind.value}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="3" height="6" fill="{color}"/></pattern>'
    )


def _color_rules() -> str:
    rules = [
        f".{kind.value}.{op.value}>rect:first-of-type{{fill:{color}}}"
        for (kind, op), color in COLORS.items()
    ]
    rules += [f"rect.{part.field}{{fill:{part.color}}}" for part in PARTS]
    return "".join(rules)
