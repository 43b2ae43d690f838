"""Memory of every stage over a step: what fills it, and how close it comes to the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op, Timeline
from ds_infinipipe.planner.predict.ledger import PART_NAMES, plan_ledger
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.viz.figure import new_figure, save_figure

__all__ = [
    "PARTS",
    "MemoryStep",
    "MemoryUsage",
    "memory_axis_bytes",
    "memory_over_time",
    "memory_series",
    "memory_size",
    "memory_table",
    "memory_usages",
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


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """What is alive on one rank of a stage, bytes; `stashes` is what W's to come need."""

    states: int
    activations: int
    kv_arenas: int
    kv_gradients: int
    stashes: int
    transient: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in PART_NAMES)


_Usages: TypeAlias = Sequence[tuple[Instruction, MemoryUsage, MemoryUsage]]


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
    return tuple((str(i), during.total) for i, during, _ in memory_usages(plan)[stage])


def memory_usages(plan: Plan) -> tuple[_Usages, ...]:
    """`result[stage]`: all that computes, and what is alive while it runs and after it."""
    ledger, schedule, counts = plan_ledger(plan)
    during, after = (np.moveaxis(p, 0, -1).tolist() for p in ledger.parts(schedule, counts))
    result: list[_Usages] = []
    for stage, stream in enumerate(plan.streams):
        computing = [instruction for instruction in stream if instruction.op.is_compute]
        # shorter lists than the longest end in NOTHING
        rows = zip(computing, during[stage], after[stage], strict=False)
        result.append([(i, MemoryUsage(*at), MemoryUsage(*then)) for i, at, then in rows])
    return tuple(result)


def memory_over_time(
    plan: Plan, timeline: Timeline | None = None
) -> tuple[tuple[MemoryStep, ...], ...]:
    """`result[stage]`: what is alive when, by the spans of `timeline` (default: the forecast)."""
    timeline = forecast(plan) if timeline is None else timeline
    spans = {(s.stage, s.op, s.chunk): (s.start_s, s.end_s) for s in timeline.spans}
    return tuple(
        _stage_steps(usages, stage, spans, timeline)
        for stage, usages in enumerate(memory_usages(plan))
    )


def _stage_steps(
    usages: _Usages,
    stage: int,
    spans: Mapping[tuple[int, Op, int], tuple[float, float]],
    timeline: Timeline,
) -> tuple[MemoryStep, ...]:
    times = [spans[stage, i.op, i.chunk] for i, _, _ in usages]
    idle = MemoryUsage(usages[0][1].states, 0, 0, 0, 0, 0)
    steps = [MemoryStep(0.0, times[0][0], idle, "before the first instruction")]
    next_starts = [start for start, _ in times[1:]] + [timeline.makespan_s]
    rows = zip(usages, times, next_starts, strict=True)
    for (instruction, during, after), (start_s, end_s), next_s in rows:
        steps.append(MemoryStep(start_s, end_s, during, f"during {instruction}"))
        steps.append(MemoryStep(end_s, next_s, after, f"after {instruction}"))
    return tuple(step for step in steps if step.end_s > step.start_s)


def memory_table(plan: Plan) -> str:
    """Text: each stage's peak in its parts, the instruction it happens in, what is free."""
    peaks = [_peak(usages, plan, stage) for stage, usages in enumerate(memory_usages(plan))]
    is_large = max(usage.total for _, usage in peaks) >= _GIB
    unit, name = (_GIB, "GiB") if is_large else (2**20, "MiB")
    head = "".join(f"{part.name:>14}" for part in PARTS)
    lines = [f"memory at the peak, {name}", f"stage{head}{'in all':>10}{'free':>10}  in"]
    for stage, (instruction, usage) in enumerate(peaks):
        parts = "".join(f"{value / unit:>14.2f}" for value in usage_parts(usage))
        free = (plan.setup.limit_bytes - usage.total) / unit
        lines.append(f"{stage:>5}{parts}{usage.total / unit:>10.2f}{free:>10.2f}  {instruction}")
    return "\n".join(lines)


def _peak(usages: _Usages, plan: Plan, stage: int) -> tuple[Instruction, MemoryUsage]:
    """The first instruction at which most is alive; of a stage without work its states."""
    if not usages:
        return plan.streams[stage][-1], MemoryUsage(plan.predicted.peak_bytes[stage], 0, 0, 0, 0, 0)
    # max() keeps the first of equals
    instruction, during, _ = max(usages, key=lambda entry: entry[1].total)
    return instruction, during


def memory_axis_bytes(plan: Plan) -> float:
    """Top of the memory axis: above limit and peaks, or above the peaks if the limit is far off."""
    peak = max(plan.predicted.peak_bytes)
    limit = plan.setup.limit_bytes
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
    limit_gib = plan.setup.limit_bytes / _GIB
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
