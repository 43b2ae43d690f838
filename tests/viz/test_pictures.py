"""Pictures and pages of plans: nothing is missing, nothing comes from elsewhere."""

from __future__ import annotations

import builtins
import re
import struct
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from handmade import random_plan, rich_plan, unit_timeline, with_setup
from page_reader import PageReader

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op, Timeline
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.planner.verify.frame import peak_bytes_by_stage
from ds_infinipipe.planner.verify.memory import memory_usage
from ds_infinipipe.viz.bars import timeline_bars
from ds_infinipipe.viz.gantt import gantt_size, write_gantt
from ds_infinipipe.viz.memory import (
    memory_over_time,
    memory_series,
    memory_size,
    memory_table,
    memory_usages,
    usage_parts,
    write_memory_png,
)
from ds_infinipipe.viz.page import plan_page
from ds_infinipipe.viz.page_parts import time_ticks
from ds_infinipipe.viz.recompute_map import recompute_map, recompute_text

SEEDS = range(12)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from the IHDR chunk."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def two_timelines(plan: Plan) -> dict[str, Timeline]:
    return {"predicted": forecast(plan), "measured": unit_timeline(plan)}


def test_the_picture_has_its_size_and_both_timelines_make_it_taller(tmp_path: Path) -> None:
    plan = rich_plan()
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    write_gantt(one, {"predicted": forecast(plan)}, plan)
    write_gantt(two, two_timelines(plan), plan)
    assert png_size(one) == gantt_size(1, 3)
    assert png_size(two) == gantt_size(2, 3)
    assert one.stat().st_size > 5_000
    assert png_size(two)[1] > png_size(one)[1]


def test_the_memory_picture_has_its_size(tmp_path: Path) -> None:
    plan = rich_plan()
    write_memory_png(tmp_path / "memory.png", plan)
    assert png_size(tmp_path / "memory.png") == memory_size(3)
    assert (tmp_path / "memory.png").stat().st_size > 5_000


@pytest.mark.parametrize("seed", SEEDS)
def test_the_page_has_each_chunk_once_per_stage_direction_and_timeline(seed: int) -> None:
    plan = random_plan(seed)
    page = PageReader(plan_page(two_timelines(plan), plan))
    assert page.open == []
    shown = Counter(
        (s["data-timeline"], int(s["data-stage"] or -1), s["data-op"], int(s["data-chunk"] or -1))
        for s in page.of_class("span")
    )
    expected = {
        (name, stage, op, chunk)
        for name in ("predicted", "measured")
        for stage in range(plan.layout.pp)
        for op, chunk in {(i.op.value, i.chunk) for i in plan.streams[stage] if i.op.is_compute}
    }
    assert {(s, k) for _, s, op, k in expected if op in "BI"} == {
        (s, k) for s in range(plan.layout.pp) for k in range(len(plan.chunks))
    }
    assert shown == Counter(expected)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = plan_page(two_timelines(rich_plan()), rich_plan())
    page = PageReader(text)
    assert not [a for _, a in page.elements if {"src", "href", "xlink:href", "data"} & set(a)]
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert "http" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {
        "#hatch-split",
        "#hatch-hybrid",
        "#hatch-batched",
    }


def test_the_page_escapes_what_a_model_is_called() -> None:
    plan = rich_plan()
    plan = with_setup(plan, model=replace(plan.model, name="<script>alert(1)</script>"))
    text = plan_page({'"><b>': forecast(plan)}, plan)
    assert "<script>alert" not in text
    assert "<b>" not in text


def test_tooltips_say_chunk_tokens_context_times_and_recompute() -> None:
    plan = rich_plan()
    bars = timeline_bars(unit_timeline(plan), plan)
    # chunk 1: 8 tokens behind 8 of sequence 0, 6 of sequence 2 beside them; (1 + 2) % 5 = 3 layers
    bar = next(
        b for b in bars if (b.span.stage, b.span.op, b.span.chunk) == (1, Op.BACKWARD_INPUT, 1)
    )
    start, end = bar.span.start_s, bar.span.end_s
    assert bar.description.splitlines() == [
        "I1 on stage 1",
        "chunk 1, hybrid: 14 tokens of 2 sequences, context 8",
        f"{start:.4g} s to {end:.4g} s, 2.5 s",
        "3 of 4 layers recomputed",
    ]
    assert 0.0 < bar.recompute_share < 1.0
    titles = PageReader(plan_page({"x": unit_timeline(plan)}, plan)).texts["title"]
    assert bar.description in titles


@pytest.mark.parametrize("seed", SEEDS)
def test_recompute_is_marked_on_those_backwards_that_recompute(seed: int) -> None:
    plan = random_plan(seed)
    table = recompute_map(plan)
    for bar in timeline_bars(forecast(plan), plan):
        marked = bar.span.op.makes_gradient and table[bar.span.stage][bar.span.chunk] > 0
        assert (bar.recompute_share > 0) == marked


@pytest.mark.parametrize("seed", SEEDS)
def test_the_memory_series_has_the_predicted_peak_as_maximum(seed: int) -> None:
    plan = random_plan(seed)
    for stage in range(plan.layout.pp):
        series = memory_series(plan, stage)
        assert max(total for _, total in series) == plan.predicted.peak_bytes[stage]
        assert len(series) == sum(i.op.is_compute for i in plan.streams[stage])
    assert plan.predicted.peak_bytes == peak_bytes_by_stage(plan)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_part_is_what_the_verifier_counts_from_the_streams(seed: int) -> None:
    plan = random_plan(seed)
    for stage, usages in enumerate(memory_usages(plan)):
        counted = list(memory_usage(plan, stage))
        assert len(counted) == len(usages)
        for own, theirs in zip(usages, counted, strict=True):
            assert str(own[0]) == str(plan.streams[stage][theirs[0].instruction])
            for mine, other in zip(own[1:], theirs, strict=True):
                names = ("states", "activations", "kv_arenas", "kv_gradients", "stashes")
                for name in (*names, "transient"):
                    assert getattr(mine, name) == getattr(other, name), (own[0], name)


@pytest.mark.parametrize("seed", SEEDS)
def test_after_the_last_backward_only_states_and_gradients_on_their_way_are_left(seed: int) -> None:
    plan = random_plan(seed)
    hidden = [MemoryModel(plan.setup).input_bytes(chunk) for chunk in plan.chunks]
    for stage in range(plan.layout.pp):
        *_, (_, _, after) = memory_usages(plan)[stage]
        assert after.total == after.states + after.activations
        if stage == 0:
            assert after.activations == 0
        else:
            order = [i.chunk for i in plan.streams[stage] if i.op.makes_gradient]
            endings = [sum(hidden[chunk] for chunk in order[at:]) for at in range(len(order))]
            assert after.activations in endings


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_over_time_fills_the_step_and_its_parts_add_up(seed: int) -> None:
    plan = random_plan(seed)
    timeline = forecast(plan)
    for stage, steps in enumerate(memory_over_time(plan, timeline)):
        assert steps[0].start_s == 0.0
        assert steps[-1].end_s == pytest.approx(timeline.makespan_s)
        for before, after in pairwise(steps):
            assert before.end_s == after.start_s
        for step in steps:
            assert min(step.parts) >= 0
            assert sum(step.parts) == step.usage.total
        assert max(step.usage.total for step in steps) == plan.predicted.peak_bytes[stage]


def test_a_negative_transient_is_taken_off_the_gradients_that_are_not_there_yet() -> None:
    plan = rich_plan()
    _, during, _ = memory_usages(plan)[0][0]
    usage = replace(during, kv_gradients=50, activations=100, transient=-70)
    assert usage_parts(usage) == (usage.states, 80, usage.kv_arenas, 0, 0, 0)
    assert sum(usage_parts(usage)) == usage.total


@pytest.mark.parametrize("seed", SEEDS)
def test_the_recompute_map_is_the_pipelines_table(seed: int) -> None:
    plan = random_plan(seed)
    table = recompute_map(plan)
    for pipeline in plan.pipelines:
        for stage, row in enumerate(pipeline.recompute):
            assert tuple(table[stage][chunk] for chunk in pipeline.forward) == row
    page = PageReader(plan_page({"x": unit_timeline(plan)}, plan))
    shown = {
        (int(c["data-stage"] or -1), int(c["data-chunk"] or -1)): int(c["data-layers"] or -1)
        for c in page.of_class("cell")
    }
    assert shown == {(p, k): n for p, row in enumerate(table) for k, n in enumerate(row)}


def test_the_recompute_text_of_a_plan_is_this() -> None:
    assert recompute_text(rich_plan()).splitlines() == [
        "recompute  layers by stage and chunk, chunks in forward order; . is none",
        "pipeline 0",
        "chunk     0 1 2 3",
        "stage 0   . 1 2 3",
        "stage 1   2 3 4 .",
        "stage 2   4 . 1 2",
        "pipeline 1",
        "chunk     4 5 6",
        "stage 0   4 . 1",
        "stage 1   1 2 3",
        "stage 2   3 4 .",
    ]


def test_the_memory_table_has_a_line_per_stage_that_ends_with_the_peaks_instruction() -> None:
    plan = rich_plan()
    lines = memory_table(plan).splitlines()
    assert len(lines) == 2 + 3
    for stage, line in enumerate(lines[2:]):
        series = memory_series(plan, stage)
        at_peak = next(name for name, total in series if total == plan.predicted.peak_bytes[stage])
        assert line.split()[0] == str(stage)
        assert line.split()[-1] == at_peak


@pytest.mark.parametrize("end_s", [0.0031, 0.7, 1.0, 13.2, 999.0, 86400.0])
def test_ticks_of_the_time_axis_are_few_and_round(end_s: float) -> None:
    ticks = time_ticks(end_s)
    assert 4 <= len(ticks) <= 12
    assert 0 < ticks[0] < ticks[-1] < end_s
    assert {f"{tick:.9e}"[0] for tick in ticks[:1]} <= {"1", "2", "5"}


def test_a_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: object, **more: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    plan = rich_plan()
    with pytest.raises(ConfigError, match=r"pip install 'ds-infinipipe\[viz\]'"):
        write_gantt(tmp_path / "x.png", two_timelines(plan), plan)
    write_gantt(tmp_path / "x.html", two_timelines(plan), plan)


@pytest.mark.parametrize("name", ["plan.svg", "plan", "plan.json"])
def test_other_kinds_of_pictures_are_refused(tmp_path: Path, name: str) -> None:
    plan = rich_plan()
    with pytest.raises(ConfigError, match=r"written as \.png or \.html"):
        write_gantt(tmp_path / name, two_timelines(plan), plan)


@pytest.mark.parametrize("name", ["absent/plan.png", "absent/plan.html"])
def test_a_file_that_cannot_be_written_is_a_configuration_error(tmp_path: Path, name: str) -> None:
    plan = rich_plan()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_gantt(tmp_path / name, two_timelines(plan), plan)
