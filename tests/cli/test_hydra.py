"""Hydra composes the same JSON that people write, and a multirun predicts each of its points."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_infinipipe.cli import main
from ds_infinipipe.cli.files.config import compose_config, config_text
from ds_infinipipe.cli.parts.sweep_training import measured, outputs_below, train_point
from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.runtime.engine.report import StepReport

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("model", "data", "cluster", "layout", "deepspeed", "planner", "experiment")
CHOICES = [
    (group, file.stem) for group in GROUPS for file in sorted((ROOT / "configs" / group).glob("*"))
]


QUICK = ("infinipipe.planner.mode=paper", "infinipipe.planner.solver=greedy")
"""A planner that takes milliseconds."""


def step_line(step: int, loss: float, seconds: float) -> str:
    """The line a training run logs for a step."""
    report = StepReport(
        step, loss, 1.0, 900, 3, 4, 0, {"split": 1, "batched": 2, "hybrid": 0}, 1, 5, seconds,
        seconds, seconds, 0.1, 0.1, 0.01, 0.0, False, True,
    )  # fmt: skip
    return f"12:00:00 {report.line()}\n"


def sweep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds_infinipipe", "sweep", "-m", *arguments]
    return subprocess.run(
        [*command, f"hydra.sweep.dir={folder}/out", "sweep.lengths=github-b:40"],
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_of_every_group_composes_a_valid_json(group: str, choice: str) -> None:
    more = ["data.path=x"] if (group, choice) == ("data", "folder") else []
    more = [f"infinipipe.{m}" for m in more]
    config = compose_config([f"{group}={choice}", *more])
    assert InfiniPipeConfig.from_deepspeed(config).model.config is not None
    assert config["train_batch_size"] >= 1


def test_the_committed_quickstart_is_what_hydra_composes() -> None:
    committed = (ROOT / "configs" / "json" / "quickstart.json").read_text()
    composed = config_text(compose_config(["experiment=quickstart"]))
    assert committed == composed, "run: infinipipe config experiment=quickstart -o configs/json/..."


def test_values_and_groups_are_overridden(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    overrides = ["model=llama_tiny", "planner=full_recompute", "train_batch_size=3"]
    overrides += ["infinipipe.parallel.pp=4", "infinipipe.planner.alignment=8"]
    assert main(["config", "-o", str(out), *overrides]) == 0
    config = InfiniPipeConfig.from_deepspeed(out)
    assert config.planner.recompute == "full"
    assert (config.parallel.pp, config.planner.alignment) == (4, 8)
    assert config.model.load_spec().num_kv_heads == 4
    assert json.loads(out.read_text())["train_batch_size"] == 3


def test_an_experiment_has_the_last_word_but_one(tmp_path: Path) -> None:
    steps = InfiniPipeConfig.from_deepspeed(
        compose_config(["experiment=quickstart"])
    ).training.steps
    assert steps != InfiniPipeConfig().training.steps
    changed = compose_config(["experiment=quickstart", "infinipipe.training.steps=3"])
    assert InfiniPipeConfig.from_deepspeed(changed).training.steps == 3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=gpt9", "Could not find 'model/gpt9'"),
        ("infinipipe.planner.recompte=full", "did you mean 'recompute'?"),
        ("+infinipipe.planner.recompte=full", "did you mean 'recompute'?"),
        ("train_batchsize=4", "Could not override 'train_batchsize'"),
        ("+train_batch_sise=16", "'train_batch_sise' of the DeepSpeed configuration is unknown"),
        ("data=folder", "infinipipe.data.path"),
        ("planner", "missing EQUAL"),
    ],
)
def test_wrong_overrides_are_one_paragraph(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", {}),
        (step_line(1, 5.5, 9.0), (1, 9.0, 5.5)),
        (step_line(1, 5.5, 9.0) + step_line(2, 5.25, 2.0) + step_line(3, 5.0, 4.0), (3, 3.0, 5.0)),
    ],
)
def test_step_time_and_loss_are_read_from_the_lines_that_training_logs(
    log: str, expected: tuple[int, float, float] | dict[str, object]
) -> None:
    assert measured(log) == (
        dict(zip(("trained_steps", "measured_step_time_s", "last_loss"), expected, strict=True))
        if expected
        else {}
    )


def test_the_deepspeed_launcher_of_a_sweep_gets_a_free_port_unless_it_has_one(
    tmp_path: Path,
) -> None:
    launcher = tmp_path / "deepspeed"
    launcher.write_text('#!/bin/sh\necho "$@"\n')
    launcher.chmod(0o755)
    for options, port in ([], r"[1-9]\d+"), (["--master_port", "7"], "7"):
        train_point(Path("run.json"), [str(launcher), *options], tmp_path)
        printed = (tmp_path / "train.log").read_text()
        assert re.fullmatch(rf"--master_port {port} --module ds_infinipipe train .*\n", printed)


def test_each_point_trains_into_its_own_folder() -> None:
    config = {"infinipipe": {"checkpoint": {"save_dir": "run"}, "debug": {"trace": "/else"}}}
    changed = outputs_below(config, Path("/sweep/0"))["infinipipe"]
    assert changed["checkpoint"]["save_dir"] == "/sweep/0/run"
    assert changed["training"]["failure_dir"] == "/sweep/0/failed-steps"
    assert changed["debug"] == {"trace": "/else"}
    assert config["infinipipe"]["checkpoint"]["save_dir"] == "run"


def training_sweep(
    folder: Path, code: int, *points: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A sweep whose launcher logs step 7 and exits with `code`, and the arguments of its calls."""
    launcher = folder / "launcher.py"
    launcher.write_text(
        "import sys, pathlib\n"
        "pathlib.Path('started').open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"print({step_line(7, 4.125, 2.5)!r})\n"
        f"sys.exit({code})\n"
    )
    done = sweep(
        folder,
        *points,
        "infinipipe.data.context_length=1024",
        "infinipipe.data.over_length=truncate",
        "sweep.run=train",
        f"sweep.launcher=[{sys.executable},{launcher}]",
    )
    return done, (folder / "started").read_text().splitlines()


def test_a_multirun_predicts_every_point_and_trains_those_with_a_plan(tmp_path: Path) -> None:
    """One sweep for all of it, as planning takes most of its time."""
    limits = "infinipipe.planner.memory_limit_gib=0.001,4.0"
    done, started = training_sweep(tmp_path, 0, "planner=lean,full_recompute", limits)
    assert done.returncode == 0, done.stderr
    points = [tmp_path / "out" / str(number) for number in range(4)]
    outcomes = [json.loads((point / "prediction.json").read_text()) for point in points]
    assert [o["status"] for o in outcomes] == ["infeasible", "planned", "infeasible", "planned"]
    assert outcomes[0]["reason"] and outcomes[2]["reason"]
    lean, full = outcomes[1], outcomes[3]
    assert lean["tokens"] == full["tokens"]
    assert lean["recomputed_layers"] < full["recomputed_layers"]
    assert lean["step_time_s"] < full["step_time_s"]
    assert lean["peak_bytes"] > full["peak_bytes"]
    written = InfiniPipeConfig.from_deepspeed(points[3] / "deepspeed.json")
    assert written.planner.recompute == "full"

    assert len(started) == 2
    assert started[0].startswith("--module ds_infinipipe train --deepspeed_config ")
    assert Path(started[0].split()[-1]) == points[1] / "deepspeed.json"
    for point in (points[1], points[3]):
        found = json.loads((point / "measured.json").read_text())
        assert found == {"trained_steps": 7, "measured_step_time_s": 2.5, "last_loss": 4.125}

    table = done.stdout[done.stdout.rindex("point ") :]
    assert "planner=full_recompute" in table
    assert {"2.500", "4.1250"} <= set(table.splitlines()[-1].split())
    assert "predicted for the first batch of github-b:40\n" in done.stdout
    assert "activations of plain Hugging Face layers" in done.stdout
    assert "on the corpus, which is another batch" in done.stdout


def test_a_training_sweep_goes_on_after_a_launcher_that_fails(tmp_path: Path) -> None:
    done, started = training_sweep(tmp_path, 7, *QUICK, "infinipipe.planner.seed=1,2")
    assert (done.returncode, len(started)) == (1, 2)
    assert "step 7 | loss 4.1250" in (tmp_path / "out/1/train.log").read_text()
    assert "ended with exit code 7; its output is in " in done.stderr


def test_a_sweep_only_predicts_unless_it_is_told_to_train(tmp_path: Path) -> None:
    done = sweep(tmp_path, *QUICK, "infinipipe.data.context_length=1024,2048")
    assert done.returncode == 0, done.stderr
    for point in (tmp_path / "out/0", tmp_path / "out/1"):
        assert json.loads((point / "prediction.json").read_text())["status"] == "planned"
        assert not (point / "train.log").exists() and not (point / "measured.json").exists()
    assert "measured" not in done.stdout


def test_a_wrong_sweep_is_exit_code_2(tmp_path: Path) -> None:
    done = sweep(tmp_path, "planner=lean,magic")
    assert done.returncode == 2
    assert "Could not find 'planner/magic'" in done.stderr
    assert "Traceback" not in done.stderr
