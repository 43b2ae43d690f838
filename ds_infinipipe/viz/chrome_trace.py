"""Timelines as Chrome trace JSON, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op, Span, Timeline

__all__ = ["chrome_trace", "write_chrome_trace"]

_CATEGORY = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradients",
}


def chrome_trace(timelines: Mapping[str, Timeline], plan: Plan | None = None) -> dict[str, Any]:
    """The trace as a JSON object: one process per timeline, one row (thread) per stage.

    Give a predicted and a measured timeline together to see them one above the other. With the
    plan, each event also carries its chunk's kind, tokens and context, and the recomputed layers.
    Times of the trace are microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        title = f"{name}: {timeline.makespan_s:.4g} s, bubbles {timeline.bubble_ratio:.1%}"
        events.append(_label(process, "process_name", title))
        for stage in range(len(timeline.busy_s)):
            events.append(_label(process, "thread_name", f"stage {stage}", stage))
            events.append(
                {**_label(process, "thread_sort_index", "", stage), "args": {"sort_index": stage}}
            )
        recomputed = _recomputed_layers(plan)
        events += [_event(process, span, plan, recomputed) for span in timeline.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(
    path: Path | str, timelines: Mapping[str, Timeline], plan: Plan | None = None
) -> None:
    """Write `chrome_trace` of these timelines to a file."""
    Path(path).write_text(json.dumps(chrome_trace(timelines, plan)), encoding="utf-8")


def _label(process: int, kind: str, name: str, stage: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": stage, "args": {"name": name}}


def _event(
    process: int, span: Span, plan: Plan | None, recomputed: Mapping[tuple[int, int], int]
) -> dict[str, Any]:
    details: dict[str, Any] = {"chunk": span.chunk}
    if plan is not None:
        chunk = plan.chunks[span.chunk]
        details |= {
            "kind": chunk.kind.value,
            "tokens": chunk.padded_tokens,
            "context_tokens": chunk.context_len,
            "recomputed_layers": recomputed[span.stage, span.chunk],
        }
    return {
        "ph": "X",
        "name": f"{span.op.value}{span.chunk}",
        "cat": _CATEGORY[span.op],
        "pid": process,
        "tid": span.stage,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": details,
    }


def _recomputed_layers(plan: Plan | None) -> dict[tuple[int, int], int]:
    if plan is None:
        return {}
    return {
        (stage, i.chunk): i.recompute
        for stage, stream in enumerate(plan.streams)
        for i in stream
        if i.op is Op.FORWARD
    }
