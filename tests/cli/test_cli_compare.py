"""compare, lengths and plan --layout auto on the command line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_infinipipe.cli import main
from ds_infinipipe.data.lengths import read_lengths
from ds_infinipipe.planner.plan.plan import Plan

BATCH = ["--lengths", "github-b:48:3", "--context", "16384", "--model", "llama-7b"]
CLUSTER = ["--cluster", "a800-80g-2x4", "--solver", "greedy", "--max-slices", "3"]


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return code, text


def test_compare_prints_every_system_and_writes_csv_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, results, plot = (str(tmp_path / name) for name in ("c.csv", "c.json", "c.png"))
    arguments = ["compare", *BATCH, *CLUSTER, "--csv", table, "--json", results, "--plot", plot]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name in ("ours", "Seq1F1B", "DAPPLE", "GPipe", "DeepSpeed", "FlexSP", "Megatron-LM"):
        assert name in printed
    assert "memory with the activations of fused kernels" in printed
    with open(table, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    stated = json.loads(Path(results).read_text())["results"]
    assert len(rows) == len(stated) >= 16
    for row, result in zip(rows, stated, strict=True):
        assert row["name"] == result["name"]
        assert float(row["step_time_s"]) == result["step_time_s"]
        assert result["ratio_to_ours"] == pytest.approx(
            result["step_time_s"] / stated[0]["step_time_s"]
        )
    assert Path(plot).read_bytes().startswith(b"\x89PNG")


def test_compare_takes_a_stage_per_node_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *BATCH, *CLUSTER, "--systems", "seq1f1b"]) == 0
    printed = capsys.readouterr().out
    assert "pp 2, sp 4, dp 1" in printed
    assert "GPipe" not in printed


def test_compare_with_auto_layout_gives_ours_the_best_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = []
    for extra in ([], ["--layout", "auto"]):
        file = tmp_path / "c.json"
        more = ["--systems", "dapple", "--json", str(file)]
        assert main(["compare", *BATCH, *CLUSTER, *more, *extra]) == 0
        results = json.loads(file.read_text())["results"]
        times.append((results[0]["step_time_s"], results[-1]["step_time_s"]))
    assert times[1][0] <= times[0][0]
    assert times[1][1] <= times[0][1]


def test_plan_with_auto_layout_ranks_layouts_and_writes_a_plan_for_each_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", *BATCH, *CLUSTER, "--layout", "auto", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "pp  sp  dp" in printed
    plans = [Plan.from_json(file.read_text()) for file in sorted(tmp_path.glob("plan*.json"))]
    assert len(plans) == plans[0].layout.dp
    assert plans[0].layout.world_size == 8
    assert sum(len(plan.lengths) for plan in plans) == 48


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--layout", "auto", "--pp", "2"], "--layout auto chooses the degrees: leave out --pp"),
        (["--pp", "3", "--sp", "4"], "pp 3 x sp 4 = 12 ranks, but cluster a800-80g-2x4 has 8"),
        (["--pp", "2", "--sp", "4", "--dp", "2"], "pp 2 x sp 4 x dp 2 = 16 ranks"),
        (["--dp", "0", "--pp", "2"], "dp is 0"),
        (["--max-slices", "0"], "planner.max_slices is 0"),
        (["--systems", "alpa"], "--systems: 'alpa' is not one of ours, seq1f1b"),
        (["--csv", "absent/c.csv"], "the folder does not exist"),
        (["--cluster", "a800-80g-0x8"], "has no devices"),
        (["--lengths", "absent.txt"], "absent.txt does not exist"),
    ],
)
def test_bad_comparisons_are_exit_code_2(
    capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    code, text = fails(capsys, "compare", *BATCH, *CLUSTER, *more)
    assert (code, expected in text) == (2, True), text


@pytest.mark.parametrize("content", ["5\nsix\n", "5\n-6\n", "5\n0\n", ""])
def test_a_bad_lengths_file_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(content)
    code, text = fails(capsys, "compare", *BATCH, *CLUSTER, "--lengths", str(file))
    assert code == 2
    assert "lengths.txt" in text


@pytest.mark.parametrize("verb", [["compare"], ["plan", "--layout", "auto"]])
def test_memory_below_the_model_states_is_exit_code_3(
    capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    code, text = fails(capsys, *verb, *BATCH, *CLUSTER, "--memory-gib", "0.5")
    assert code == 3
    assert "parameters, gradients and optimizer states" in text


def test_plan_needs_degrees_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = fails(capsys, "plan", *BATCH, *CLUSTER)
    assert code == 2
    assert "--pp N, or --layout auto" in text


def test_lengths_counts_a_corpus_and_writes_what_plan_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("x" * 3000)
    (tmp_path / "corpus" / "b.jsonl").write_text('{"text": "hello"}\n{"text": "h\u00e9"}\n')
    out = tmp_path / "lengths.txt"
    assert main(["lengths", str(tmp_path / "corpus"), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert sorted(read_lengths(out).tolist()) == [3, 5, 3000]
    assert "documents  3, 3,008 tokens, mean 1,003, longest 3,000" in printed
    assert "        50  5\n" in printed
    assert "    1K     66.67%   0.27%" in printed
    assert "    4K    100.00%  100.00%" in printed
    assert main(["plan", "--lengths", str(out), *BATCH[2:], *CLUSTER, "--pp", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["absent"], "'absent' is neither a file nor a folder"),
        ([".", "--max-documents", "0"], "--max-documents 0"),
        ([".", "-o", "absent/l.txt"], "the folder does not exist"),
    ],
)
def test_a_corpus_that_cannot_be_counted_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, text = fails(capsys, "lengths", *arguments)
    assert (code, expected in text) == (2, True), text


def test_comparing_and_counting_load_neither_torch_nor_matplotlib() -> None:
    arguments = ["compare", *BATCH, *CLUSTER, "--systems", "dapple"]
    code = (
        "import sys; from ds_infinipipe.cli import main;"
        f"main({arguments!r});"
        "heavy = [m for m in ('torch', 'deepspeed', 'matplotlib', 'hydra') if m in sys.modules];"
        "print('loaded', heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded []"
