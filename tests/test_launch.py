"""The launch scripts, and training under the DeepSpeed launcher."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_infinipipe.cli.config import compose_config

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(p for p in (ROOT / "launch").iterdir() if p.suffix in (".sh", ".sbatch"))


def launch(folder: Path, config: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    """Train on 4 CPU ranks under the `deepspeed` launcher."""
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", os.devnull]
    command += ["--num_accelerators", "4", "--master_port", port, "--module", "ds_infinipipe"]
    return subprocess.run(
        [*command, "train", "--deepspeed_config", str(file), *more],
        cwd=folder,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )


def tiny_run(corpus: Path) -> dict[str, Any]:
    config = compose_config(["experiment=quickstart", f"infinipipe.data.path={corpus}"])
    config["infinipipe"]["data"] |= {"context_length": 900, "over_length": "split"}
    config["infinipipe"]["runtime"] = {"timeout_s": 60.0}
    return config


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of 2 to 900 bytes, most of them short, as text and as JSONL."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, size in enumerate((2, 30, 90, 40, 900, 15, 260, 120, 700, 61, 45, 333)):
        (folder / f"{number:02d}.txt").write_text(
            f"{number} the cat sat on the mat. " * 99, "utf-8"
        )
        with open(folder / f"{number:02d}.txt", "r+b") as file:
            file.truncate(size)
    rows = [{"text": f"a line of its own, number {n}"} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_launch_scripts_are_short_and_parse(script: Path) -> None:
    assert len(script.read_text().splitlines()) < 40
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_train_sh_says_how_it_is_used() -> None:
    script = ROOT / "launch" / "train.sh"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "bash launch/train.sh [LAUNCHER OPTIONS --] run.json" in done.stderr


def test_the_ci_entry_runs_the_test_script() -> None:
    assert "launch/test.sh" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.ranks
@pytest.mark.slow
def test_training_under_the_launcher_logs_every_step_and_learns(
    tmp_path: Path, corpus: Path
) -> None:
    done = launch(tmp_path, tiny_run(corpus), "--steps", "8", "infinipipe.debug.dump_plans=plans")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(text) for text in re.findall(r"step \d+ \| loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    lengths = [
        json.loads(p.read_text())["lengths"] for p in sorted((tmp_path / "plans").glob("*.json"))
    ]
    epochs = [sorted(lengths[step] + lengths[step + 1]) for step in range(0, 8, 2)]
    assert epochs == [epochs[0]] * 4
    assert sum(epochs[0]) == int(re.findall(r"24 sequences of (\d+) tokens", done.stdout)[0])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("override", "code", "expected"),
    [
        ("infinipipe.planer.mode=paper", 2, "did you mean 'planner'?"),
        ("infinipipe.parallel.pp=3", 2, "pp 3 x sp 2 x dp 1 = 6 ranks, but 4 were started"),
        ("infinipipe.data.path=/nowhere", 2, "data path '/nowhere' is neither a file nor"),
    ],
)
def test_bad_input_under_the_launcher_ends_with_its_exit_code(
    tmp_path: Path, corpus: Path, override: str, code: int, expected: str
) -> None:
    done = launch(tmp_path, tiny_run(corpus), override)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.count(expected) == 1
    assert expected in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
