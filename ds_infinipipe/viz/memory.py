"""Memory of every stage over a step: what fills it, and how close it comes to the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_infinipipe.planner.forecast import forecast
from ds_infinipipe.planner.types import Op, Plan, Timeline
from ds_infinipipe.planner.verify_memory import MemoryUsage, memory_usage, peak_usages
from ds_infinipipe.viz.figure import new_figure, save_figure

__all__ = [
    "PARTS",
    "MemoryStep",
    "memory_axis_bytes",
    "memory_over_time",
    "memory_series",
    "memory_size",
    "memory_table",
    "usage_parts",
    "write_memory_png",
]

_GIB = 2**30
_WIDTH_PX = 1600
_STAGE_PX = 150
_FRAME_PX = 80
_FAR_LIMIT = 4  # times the peak; a limit farther off would flatten the chart


@dataclass(frozen=True)
class _Part:
    field: str
    name: str
    color: str


# from the bottom of the stack to its top
PARTS = (
    _Part("states", "model states", "#bdbdbd"),
    _Part("activations", "activations", "#6baed6"),
    _Part("kv_arenas", "K/V arenas", "#74c476"),
    _Part("kv_gradients", "dK/dV", "#fdae6b"),
    _Part("stashes", "for weights", "#fa9fb5"),
    _Part("transient", "transient", "#9e9ac8"),
)


@dataclass(frozen=True)
class MemoryStep:
    """A time with constant memory on one stage; `when` says "during B3", "after B3"."""

    start_s: float
    end_s: float
    usage: MemoryUsage
    when: str

    @property
    def parts(self) -> tuple[int, ...]:
        return usage_parts(self.usage)


def usage_parts(usage: MemoryUsage) -> tuple[int, ...]:
    """Bytes of each of PARTS, none negative, in all `usage.total`.

    A tail's backward gives up activations layer by layer while dK/dV grow, so its transient part
    may be negative: what is not there yet is then taken off dK/dV, and off activations.
    """
    *parts, transient = (int(getattr(usage, part.field)) for part in PARTS)
    for place in (3, 1):
        taken = min(parts[place], max(0, -transient))
        parts[place] -= taken
        transient += taken
    return (*parts, transient)


def memory_series(plan: Plan, stage: int) -> tuple[tuple[str, int], ...]:
    """(instruction, bytes while it runs) of all that computes; the maximum is the stage's peak."""
    return tuple(
        (str(plan.streams[stage][during.instruction]), during.total)
        for during, _ in memory_usage(plan, stage)
    )


def memory_over_time(
    plan: Plan, timeline: Timeline | None = None
) -> tuple[tuple[MemoryStep, ...], ...]:
    """`result[stage]`: what is alive when, by the spans of `timeline` (default: the forecast)."""
    timeline = forecast(plan) if timeline is None else timeline
    spans = {(s.stage, s.op, s.chunk): (s.start_s, s.end_s) for s in timeline.spans}
    return tuple(_stage_steps(plan, stage, spans, timeline) for stage in range(plan.layout.pp))


def _stage_steps(
    plan: Plan,
    stage: int,
    spans: Mapping[tuple[int, Op, int], tuple[float, float]],
    timeline: Timeline,
) -> tuple[MemoryStep, ...]:
    usages = list(memory_usage(plan, stage))
    instructions = [plan.streams[stage][during.instruction] for during, _ in usages]
    times = [spans[stage, i.op, i.chunk] for i in instructions]
    states = usages[0][0].states
    idle = MemoryUsage(0, states, 0, 0, 0, 0, 0)
    steps = [MemoryStep(0.0, times[0][0], idle, "before the first instruction")]
    next_starts = [start for start, _ in times[1:]] + [timeline.makespan_s]
    rows = zip(usages, instructions, times, next_starts, strict=True)
    for (during, after), instruction, (start_s, end_s), next_s in rows:
        steps.append(MemoryStep(start_s, end_s, during, f"during {instruction}"))
        steps.append(MemoryStep(end_s, next_s, after, f"after {instruction}"))
    return tuple(step for step in steps if step.end_s > step.start_s)


def memory_table(plan: Plan) -> str:
    """Text: each stage's peak in its parts, the instruction it happens in, what is free."""
    peaks = peak_usages(plan)
    is_large = max(usage.total for usage in peaks) >= _GIB
    unit, name = (_GIB, "GiB") if is_large else (2**20, "MiB")
    head = "".join(f"{part.name:>14}" for part in PARTS)
    lines = [f"memory at the peak, {name}", f"stage{head}{'in all':>10}{'free':>10}  in"]
    for stage, usage in enumerate(peaks):
        parts = "".join(f"{value / unit:>14.2f}" for value in usage_parts(usage))
        free = (plan.memory_limit_bytes - usage.total) / unit
        instruction = plan.streams[stage][usage.instruction]
        lines.append(f"{stage:>5}{parts}{usage.total / unit:>10.2f}{free:>10.2f}  {instruction}")
    return "\n".join(lines)


def memory_axis_bytes(plan: Plan) -> float:
    """Top of the memory axis: above limit and peaks, or above the peaks if the limit is far off."""
    peak = max(plan.predicted.peak_bytes)
    limit = plan.memory_limit_bytes
    return 1.08 * max(peak, limit if limit < _FAR_LIMIT * peak else 0)


def memory_size(pp: int) -> tuple[int, int]:
    """Width and height of the picture, pixels."""
    return _WIDTH_PX, pp * _STAGE_PX + _FRAME_PX


def write_memory_png(path: Path | str, plan: Plan, timeline: Timeline | None = None) -> None:
    """Draw the parts of every stage's memory over time, stacked, with the limit as a line.

    Raises ConfigError where matplotlib is missing or the file cannot be written.
    """
    figure = new_figure(*memory_size(plan.layout.pp))
    panels = figure.subplots(plan.layout.pp, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    everything = memory_over_time(plan, timeline)
    for stage, (axes, steps) in enumerate(zip(panels, everything, strict=True)):
        _draw_stage(axes, steps, plan, stage)
    panels[-1].set_xlabel("seconds")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
    )
    save_figure(figure, path)


def _draw_stage(axes: Any, steps: tuple[MemoryStep, ...], plan: Plan, stage: int) -> None:
    times = [t for step in steps for t in (step.start_s, step.end_s)]
    levels = [[value / _GIB for value in step.parts] for step in steps for _ in range(2)]
    axes.stackplot(
        times,
        list(zip(*levels, strict=True)),
        labels=[part.name for part in PARTS],
        colors=[part.color for part in PARTS],
        linewidth=0,
    )
    limit_gib = plan.memory_limit_bytes / _GIB
    peak_gib = plan.predicted.peak_bytes[stage] / _GIB
    axes.axhline(limit_gib, color="#c0392b", linewidth=1.2, label="limit")
    axes.set_title(
        f"stage {stage}: peak {peak_gib:.4g} of {limit_gib:.4g} GiB", loc="left", fontsize=10
    )
    axes.set_ylabel("GiB")
    axes.set_xlim(0.0, times[-1])
    axes.set_ylim(0.0, memory_axis_bytes(plan) / _GIB)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
