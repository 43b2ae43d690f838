"""Timelines as pictures: stages as rows, operations coloured by the kind of their chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from ds_infinipipe.viz.figure import new_figure, save_figure
from ds_infinipipe.viz.page import write_page

__all__ = ["check_gantt_path", "gantt_size", "write_gantt", "write_gantt_png"]

_WIDTH_PX = 1600
_ROW_PX = 46
_PANEL_PX = 64  # title and time axis
_LEGEND_PX = 40
_MARGIN_PX = 90  # beside the axes
_CHARACTER_PX = 7.6
_BAR = 0.84  # of a row's height


def check_gantt_path(path: Path | str) -> Path:
    """The path, or ConfigError for a suffix other than .png and .html."""
    path = Path(path)
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"{path}: a picture of a plan is written as .png or .html")
    return path


def write_gantt(path: Path | str, timelines: Mapping[str, Timeline], plan: Plan) -> None:
    """Write timelines of a plan, one above the other: a picture (.png) or a page (.html).

    The page also has the memory over time and the recompute map.
    """
    path = check_gantt_path(path)
    if path.suffix == ".png":
        write_gantt_png(path, timelines, plan)
    else:
        write_page(path, timelines, plan)


def gantt_size(num_timelines: int, pp: int) -> tuple[int, int]:
    """Width and height of the picture, pixels."""
    return _WIDTH_PX, num_timelines * (_PANEL_PX + pp * _ROW_PX) + _LEGEND_PX


def write_gantt_png(path: Path | str, timelines: Mapping[str, Timeline], plan: Plan) -> None:
    """Draw the timelines of one plan on a common time axis.

    Raises ConfigError where matplotlib is missing or the file cannot be written.
    """
    width_px, height_px = gantt_size(len(timelines), plan.layout.pp)
    figure = new_figure(width_px, height_px)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    end_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0) or 1.0
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        bars = timeline_bars(timeline, plan)
        _draw_panel(axes, bars, plan.layout.pp, end_s)
        axes.set_title(timeline_title(name, timeline), loc="left", fontsize=11)
    panels[-1].set_xlabel("seconds")
    _draw_legend(figure)
    save_figure(figure, path)


def _draw_panel(axes: Any, bars: Sequence[Bar], pp: int, end_s: float) -> None:
    for (kind, op), color in COLORS.items():
        chosen = [bar for bar in bars if (bar.kind, bar.span.op) == (kind, op)]
        _draw_bars(axes, chosen, facecolors=color, edgecolors="white", linewidths=0.4)
        if op.makes_gradient:
            _draw_bars(
                axes,
                [bar for bar in chosen if bar.recompute_share],
                is_share=True,
                facecolors="none",
                edgecolors=RECOMPUTE_COLORS[kind],
                hatch="//////",
                linewidths=0.0,
            )
    seconds_per_px = end_s / (_WIDTH_PX - _MARGIN_PX)
    for bar in bars:
        length_s = bar.span.end_s - bar.span.start_s
        if length_s > (len(bar.label) * _CHARACTER_PX + 2) * seconds_per_px:
            axes.text(
                bar.span.start_s + length_s / 2,
                bar.span.stage,
                bar.label,
                ha="center",
                va="center",
                fontsize=8,
                bbox={"boxstyle": "square,pad=0.1", "fc": COLORS[bar.kind, bar.span.op], "lw": 0},
            )
    axes.set_xlim(0.0, end_s)
    axes.set_ylim(pp - 0.5, -0.5)
    axes.set_yticks(range(pp), [f"stage {stage}" for stage in range(pp)])
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_bars(axes: Any, bars: Sequence[Bar], is_share: bool = False, **style: Any) -> None:
    """Rectangles of the bars, or of their recomputed share, which is drawn at their start."""
    from matplotlib.collections import PolyCollection

    corners = []
    for bar in bars:
        low, high = bar.span.stage - _BAR / 2, bar.span.stage + _BAR / 2
        start, end = bar.span.start_s, bar.span.end_s
        if is_share:
            end = start + bar.recompute_share * (end - start)
        corners.append([(start, low), (start, high), (end, high), (end, low)])
    axes.add_collection(PolyCollection(corners, **style))


def _draw_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=label) for label, color in LEGEND.items()]
    hatched = RECOMPUTE_COLORS[ChunkKind.SPLIT]
    handles.append(Patch(facecolor="none", edgecolor=hatched, hatch="//////", label="recompute"))
    figure.legend(handles=handles, loc="outside lower center", ncols=8, frameon=False, fontsize=9)
