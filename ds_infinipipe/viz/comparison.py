"""Layouts ranked and systems compared, as text tables and as a bar chart."""

from __future__ import annotations

from collections.abc import Sequence

from ds_infinipipe.baselines.result import BaselineResult, Workload
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.search.layouts import LayoutOutcome, LayoutSearch, LayoutStatus
from ds_infinipipe.viz.tables import kernels_note

__all__ = ["comparison_table", "draw_comparison", "layout_table"]

_GIB = 2**30
_REASON_LENGTH = 110


def layout_table(search: LayoutSearch) -> str:
    """Planned layouts by predicted time, then the others with what speaks against them."""
    rows: list[tuple[str, ...]] = [
        ("pp", "sp", "dp", "step s", "bubble", "peak GiB", "bound s", "")
    ]
    rows += [_layout_row(outcome) for outcome in search.ranking]
    return _align(rows, num_right=7)


def _layout_row(outcome: LayoutOutcome) -> tuple[str, ...]:
    degrees = tuple(map(str, outcome.degrees))
    if outcome.status is LayoutStatus.PLANNED:
        figures = (
            f"{outcome.step_time_s:.4g}",
            f"{outcome.bubble_ratio:.1%}",
            f"{outcome.peak_bytes / _GIB:.2f}",
            f"{outcome.bound_s:.4g}",
        )
        return (*degrees, *figures, "")
    has_bound = outcome.status is not LayoutStatus.IMPOSSIBLE
    bound = f"{outcome.bound_s:.4g}" if has_bound else "-"
    return (*degrees, "-", "-", "-", bound, f"{outcome.status.value}: {_shorten(outcome.reason)}")


def comparison_table(workload: Workload, results: Sequence[BaselineResult]) -> str:
    """One line a system and configuration; the ratio is to the first, ours."""
    ours_s = results[0].step_time_s if results[0].feasible else 0.0
    head = ("system", "config", "step s", "tokens/s", "bubble", "comm s", "recompute s")
    rows: list[tuple[str, ...]] = [(*head, "peak GiB", "ratio", "")]
    for result in results:
        name = (result.name, result.configuration)
        if not result.feasible:
            rows.append((*name, *["-"] * 7, f"not feasible: {_shorten(result.note)}"))
            continue
        rows.append(
            (
                *name,
                f"{result.step_time_s:.4g}",
                f"{result.tokens_per_s:,.0f}",
                f"{result.bubble_ratio:.1%}",
                f"{result.communication_s:.3g}",
                f"{result.recompute_s:.3g}",
                f"{result.peak_bytes / _GIB:.2f}",
                f"{result.step_time_s / ours_s:.3f}" if ours_s else "-",
                _shorten(result.note),
            )
        )
    title = (
        f"{len(workload.lengths)} sequences, {workload.num_tokens:,} tokens, longest "
        f"{workload.longest:,}; {workload.setup.model.name} on {workload.setup.cluster.name}, "
        f"{workload.num_devices} devices, {workload.setup.limit_bytes / _GIB:.4g} GiB each; "
        f"predicted\nmemory {kernels_note(workload.setup.execution)}"
    )
    return f"{title}\n\n{_align(rows, num_left=2, num_right=7)}"


def _shorten(text: str) -> str:
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."


def _align(rows: Sequence[Sequence[str]], *, num_left: int = 0, num_right: int) -> str:
    """Columns: `num_left` flush left, `num_right` flush right, the last as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(num_left + num_right)]
    lines = []
    for row in rows:
        left = [cell.ljust(widths[i]) for i, cell in enumerate(row[:num_left])]
        middle = range(num_left, num_left + num_right)
        right = [row[i].rjust(widths[i]) for i in middle]
        lines.append("  ".join([*left, *right, *row[num_left + num_right :]]).rstrip())
    return "\n".join(lines)


def draw_comparison(workload: Workload, results: Sequence[BaselineResult], path: str) -> None:
    """Bars of step time, stacked by compute, communication, recomputation and bubble, to a file.

    The format follows the file's suffix. Raises ConfigError where it cannot be written.
    """
    from matplotlib.figure import Figure

    shown = [result for result in results if result.feasible]
    figure = Figure(figsize=(9, 1.2 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    left = [0.0] * len(shown)
    for label, color, seconds in _parts(shown):
        axes.barh(places, seconds, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.set_yticks(places, [f"{r.name} ({r.configuration})" for r in shown])
    axes.invert_yaxis()
    axes.set_xlabel("predicted seconds a step")
    axes.set_title(f"{workload.setup.model.name} on {workload.setup.cluster.name}", fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error


def _parts(results: Sequence[BaselineResult]) -> list[tuple[str, str, list[float]]]:
    bubble = [r.bubble_ratio * r.step_time_s for r in results]
    waits = [r.communication_s for r in results]
    again = [r.recompute_s for r in results]
    compute = [
        r.step_time_s - sum(parts) for r, *parts in zip(results, bubble, waits, again, strict=True)
    ]
    return [
        ("compute", "#4477aa", compute),
        ("communication", "#ccbb44", waits),
        ("recomputation", "#ee6677", again),
        ("bubbles", "#bbbbbb", bubble),
    ]
