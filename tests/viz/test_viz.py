"""What people see of a plan: the text summary and the Chrome trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from handmade import make_plan, packed, rich_plan, unit_timeline, whole

from ds_infinipipe.planner.plan.plan import SolverStats
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.viz.chrome_trace import chrome_trace, write_chrome_trace
from ds_infinipipe.viz.tables import plan_summary


def test_the_summary_of_a_plan_is_this_text() -> None:
    plan = rich_plan()
    gib = 2**30
    peaks = (9 * gib, 8 * gib, 5 * gib // 2)
    plan = replace(
        plan,
        predicted=replace(plan.predicted, peak_bytes=peaks, step_time_s=0.5, bubble_ratio=0.25),
        setup=replace(plan.setup, limit_bytes=10 * gib),
        solver=SolverStats("paper", 3, "optimal", 0.015, 1.25, "2 groups"),
    )
    digest = plan.digest()[:16]
    assert plan_summary(plan).splitlines() == [
        "batch      7 sequences, 61 tokens, longest 20; tiny on cpu-local, pp 3, sp 2",
        "chunks     7: 3 split, 2 batched, 2 hybrid; 4 to 14 tokens, median 8; "
        "3 tokens of padding (4.69%)",
        "pipelines  2",
        "        0  4 chunks, 41 tokens, at most 3 slices a sequence",
        "        1  3 chunks, 20 tokens, at most 2 slices a sequence",
        "memory     with the activations of fused kernels; training here keeps more, "
        "those of plain layers",
        "gathers    parameters for every chunk",
        "",
        "stage  layers   peak GiB  limit GiB   used  recomputed layers (of all forwards')",
        "    0       4       9.00      10.00    90%  11 of 28 (39.3%)",
        "    1       4       8.00      10.00    80%  15 of 28 (53.6%)",
        "    2       4       2.50      10.00    25%  14 of 28 (50.0%)",
        "",
        "predicted  0.5 s a step, 122 tokens/s, bubbles 25.0%",
        "solver     paper mode, K = 3, optimal (gap 1.5%), 1.25 s; 2 groups",
        f"digest     {digest}",
    ]


def test_singular_words_are_used_for_one() -> None:
    plan = make_plan([5], [packed(1, whole(0, 5))], [(0,)], pp=1)
    lines = plan_summary(plan).splitlines()
    assert lines[0].startswith("batch      1 sequence, 5 tokens")
    assert lines[3] == "        0  1 chunk, 5 tokens, at most 1 slice a sequence"


def test_the_trace_has_one_row_per_stage_and_one_event_per_span() -> None:
    plan = rich_plan()
    timeline = unit_timeline(plan)
    trace = chrome_trace({"predicted": timeline}, plan)
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    num_split = sum(i.op is Op.BACKWARD_WEIGHT for stream in plan.streams for i in stream)
    assert num_split > 0
    assert len(spans) == len(timeline.spans) == 3 * 2 * 7 + num_split
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1", "stage 2"]
    second = next(e for e in spans if e["name"] == "B1" and e["tid"] == 2)
    assert second["cat"] == "backward"
    assert second["args"] == {
        "chunk": 1,
        "kind": "hybrid",
        "tokens": 14,
        "context_tokens": 8,
        "recomputed_layers": 0,
    }


def test_trace_times_are_microseconds() -> None:
    plan = make_plan([5], [packed(1, whole(0, 5))], [(0,)], pp=1)
    spans = [e for e in chrome_trace({"a": unit_timeline(plan)})["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in spans] == [(0.0, 1e6), (1e6, 2e6)]
    assert spans[0]["args"] == {"chunk": 0}


def test_predicted_and_measured_stand_in_one_file(tmp_path: Path) -> None:
    timeline = unit_timeline(rich_plan())
    path = tmp_path / "trace.json"
    write_chrome_trace(path, {"predicted": timeline, "measured": timeline})
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert timeline.makespan_s == 44.5
    assert titles == [f"{n}: 44.5 s, bubbles 37.8%" for n in ("predicted", "measured")]


def test_no_timelines_give_an_empty_trace() -> None:
    assert chrome_trace({})["traceEvents"] == []
