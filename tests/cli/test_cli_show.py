"""Seeing and explaining plans on the command line, whole and damaged ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_infinipipe.cli import main
from ds_infinipipe.planner.plan.plan import PLAN_VERSION, Plan
from ds_infinipipe.viz import figure

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


@pytest.fixture
def question(tmp_path: Path) -> list[str]:
    lengths, model = tmp_path / "lengths.txt", tmp_path / "config.json"
    lengths.write_text("".join(f"{n}\n" for n in (3000, 120, 800, 45, 260, 1024, 77, 510)))
    model.write_text(json.dumps(MODEL))
    fixed = ["--cluster", "cpu-local", "--pp", "2", "--sp", "2"]
    return ["plan", "--lengths", str(lengths), "--model", str(model), *fixed]


@pytest.fixture
def plan_file(tmp_path: Path, question: list[str], capsys: pytest.CaptureFixture[str]) -> Path:
    file = tmp_path / "plan.json"
    assert main([*question, "--json", str(file)]) == 0
    capsys.readouterr()
    return file


def test_plan_writes_timeline_memory_plot_and_trace(
    tmp_path: Path, question: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page, plot, trace = tmp_path / "p.html", tmp_path / "m.png", tmp_path / "t.json"
    more = ["--gantt", str(page), "--memory-plot", str(plot), "--trace", str(trace)]
    assert main([*question, *more]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert plot.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} == {0, 1}
    printed = capsys.readouterr().out
    for file in (page, plot, trace):
        assert f"written to {file}" in printed


def test_explain_prints_memory_recompute_and_the_worth_of_a_gib(
    question: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*question, "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "memory at the peak, MiB\nstage" in printed
    assert "recompute  no layer of any chunk is recomputed" in printed
    assert "one more GiB saves nothing; one GiB less costs nothing" in printed


def test_show_prints_what_plan_printed_and_more(
    tmp_path: Path, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "p.png"
    assert main(["show", str(plan_file), "--gantt", str(picture)]) == 0
    printed = capsys.readouterr().out
    plan = Plan.from_json(plan_file.read_text())
    assert f"digest     {plan.digest()[:16]}" in printed
    assert "memory at the peak, MiB" in printed
    assert "recompute  " in printed
    assert picture.stat().st_size > 5_000


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        plan = json.loads(text)
        change(plan)
        return json.dumps(plan)

    return edit


def redigested(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    """Edited by someone who also wrote the right digest: left for the verifier to find."""

    def edit(text: str) -> str:
        plan = json.loads(text)
        change(plan)
        stated = Plan._from_mapping(plan).digest()
        return json.dumps({**plan, "digest": stated})

    return edit


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda text: text[: len(text) // 2], f"not a plan file of version {PLAN_VERSION}"),
        (lambda text: "", "not a plan file"),
        (lambda text: "[]", "not a plan file"),
        (lambda text: "null", "not a plan file"),
        (edited(lambda p: p.update(version=7)), "version 7"),
        (edited(lambda p: p.pop("streams")), "KeyError('streams')"),
        (edited(lambda p: p["chunks"][0].update(padding=6)), "it was edited or damaged"),
        (edited(lambda p: p["streams"][0].reverse()), "it was edited or damaged"),
        (edited(lambda p: p["streams"][0].insert(0, "F")), "'F' is not an instruction"),
        (redigested(lambda p: p["lengths"].append(5)), "sequence 8: tokens 0 to 5 are missing"),
        (redigested(lambda p: p["streams"][1].pop()), "stage 1"),
        (redigested(lambda p: p["predicted"]["peak_bytes"].__setitem__(0, 1)), "peak of 1 bytes"),
        (redigested(lambda p: p["predicted"].update(step_time_s=-1.0)), "a step time of -1 s, but"),
        (redigested(lambda p: p["predicted"].update(step_time_s="1")), "step time of '1', which"),
        (redigested(lambda p: p["predicted"].update(step_time_s=10**400)), "is no finite number"),
        (redigested(lambda p: p["predicted"].update(bubble_ratio=None)), "ratio of None, which is"),
        (redigested(lambda p: p["predicted"].update(bubble_ratio=-0.5)), "bubble ratio of -0.5, b"),
        (
            redigested(lambda p: p["setup"]["cluster"].update(peak_flops=1e12)),
            "plan the batch again",
        ),
    ],
)
def test_a_damaged_plan_is_bad_input_and_says_what_is_wrong(
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[str], str],
    expected: str,
) -> None:
    plan_file.write_text(damage(plan_file.read_text()))
    assert main(["show", str(plan_file)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"infinipipe show: {plan_file}: ")
    assert expected in text
    assert "Traceback" not in text
    assert text.count("\n") == 1


def test_a_plan_with_any_value_replaced_is_shown_or_refused_but_never_crashes(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = plan_file.read_text()
    rng = random.Random(0)
    codes = []
    for _ in range(150):
        plan = json.loads(original)
        node: Any = plan
        while True:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = rng.choice(list(keys))
            if not isinstance(node[key], (dict, list)) or not node[key] or rng.random() < 0.15:
                break
            node = node[key]
        node[key] = rng.choice([None, -1, 3.5, "x", [], {}, 10**30, True])
        plan_file.write_text(json.dumps(plan))
        codes.append(main(["show", str(plan_file)]))
    assert set(codes) <= {0, 2}
    assert codes.count(2) > 120
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("content", [{"train_batch_size": 4}, {"infinipipe": {}}])
def test_a_training_configuration_is_no_plan_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(content))
    assert main(["show", str(file)]) == 2
    text = capsys.readouterr().err
    assert f"{file} is a training configuration, not a plan" in text
    assert text.count("\n") == 1


def test_without_matplotlib_pictures_are_refused_before_any_work(
    question: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    for option in ("--gantt", "--memory-plot"):
        assert main([*question, option, "p.png"]) == 2
        captured = capsys.readouterr()
        assert f"{option}: PNG pictures need matplotlib" in captured.err
        assert captured.out == ""
    assert main(["compare", *question[1:], "--plot", "p.png"]) == 2
    assert "--plot: PNG pictures need matplotlib" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["show", str(file)]) == 2
    assert "it is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--gantt", "plan.svg"], "a picture of a plan is written as .png or .html"),
        (["--gantt", "absent/plan.png"], "--gantt absent/plan.png: the folder does not exist"),
        (["--trace", "absent/t.json"], "--trace absent/t.json: the folder does not exist"),
        (["--memory-plot", "m.html"], "--memory-plot m.html: it is written as .png"),
    ],
)
def test_files_that_cannot_be_written_are_exit_code_2_before_any_work(
    question: list[str],
    plan_file: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    expected: str,
) -> None:
    for verb in (question, ["show", str(plan_file)]):
        assert main([*verb, *more]) == 2
        captured = capsys.readouterr()
        assert expected in captured.err
        assert captured.out == ""


def test_show_of_an_absent_file_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "absent.json"]) == 2
    assert "absent.json cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--max-slices", "0"], "infinipipe.planner.max_slices is 0"),
        (["--time-limit", "0"], "infinipipe.planner.solver_time_limit_s is 0.0"),
        (["--deadline", "0"], "infinipipe.planner.deadline_s is 0.0"),
        (["--deadline", "-2"], "infinipipe.planner.deadline_s is -2.0"),
        (["--time-limit", "nan"], "infinipipe.planner.solver_time_limit_s is"),
        (["--deadline", "inf"], "infinipipe.planner.deadline_s is"),
    ],
)
def test_no_slices_and_no_time_are_exit_code_2(
    question: list[str], capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    assert main([*question, *more]) == 2
    text = capsys.readouterr().err
    assert expected in text
    assert text.count("\n") == 1


def test_a_reached_deadline_is_in_the_summary(
    question: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*question, "--mode", "paper", "--deadline", "1e-6"]) == 0
    assert "deadline of 1e-06 s reached" in capsys.readouterr().out
    assert main([*question, "--deadline", "auto"]) == 0


def test_an_infeasible_batch_says_context_and_limit_in_one_paragraph(
    question: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*question, "--mode", "paper", "--memory-gib", "0.003"]) == 3
    text = capsys.readouterr().err
    assert "sequence 0 of 3000 tokens" in text
    assert "The largest context that fits at these settings, planned alone, is " in text
    assert "is enough for this batch" in text
    assert text.count("\n") == 1
