"""The launch scripts, and training under the DeepSpeed launcher."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch_cases import CPU, free_port, make_corpus, tiny_run
from programs import exit_code
from ranks import run_ranks

from ds_infinipipe.cli import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(p for p in (ROOT / "launch").iterdir() if p.suffix in (".sh", ".sbatch"))


def launch(folder: Path, config: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    """Train on 2 CPU ranks under the `deepspeed` launcher."""
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    command = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", os.devnull]
    command += [
        "--num_accelerators",
        "2",
        "--master_port",
        str(free_port()),
        "--module",
        "ds_infinipipe",
    ]
    return subprocess.run(
        [*command, "train", "--deepspeed_config", str(file), *more],
        cwd=folder,
        env={**os.environ, **CPU},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "corpus")


def _two_ranks(corpus: Path) -> dict[str, Any]:
    return tiny_run(corpus, "infinipipe.parallel.pp=2", "infinipipe.parallel.sp=1")


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
@pytest.mark.waits
def test_training_under_the_launcher_logs_every_step_and_learns(
    tmp_path: Path, corpus: Path
) -> None:
    done = launch(tmp_path, _two_ranks(corpus), "--steps", "4", "infinipipe.debug.dump_plans=plans")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(text) for text in re.findall(r"step \d+ \| loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    lengths = [
        json.loads(p.read_text())["lengths"] for p in sorted((tmp_path / "plans").glob("*.json"))
    ]
    epochs = [sorted(lengths[step] + lengths[step + 1]) for step in range(0, 4, 2)]
    assert epochs == [epochs[0]] * 2
    assert sum(epochs[0]) == int(re.findall(r"24 sequences of (\d+) tokens", done.stdout)[0])


@pytest.mark.ranks
@pytest.mark.waits
def test_bad_input_under_the_launcher_ends_with_its_exit_code(tmp_path: Path, corpus: Path) -> None:
    """Found before ranks join each other; `train` without a launcher is in tests/cli."""
    done = launch(tmp_path, _two_ranks(corpus), "infinipipe.parallel.pp=3")
    assert done.returncode == 2, done.stdout + done.stderr
    _check_last_words(done.stderr, "pp 3 x sp 1 x dp 1 = 3 ranks, but 2 were started")


@pytest.mark.ranks
def test_bad_input_that_joined_ranks_find_ends_both_with_its_exit_code(
    tmp_path: Path, corpus: Path
) -> None:
    file, stderr = tmp_path / "run.json", tmp_path / "stderr"
    file.write_text(json.dumps(_two_ranks(corpus)))
    assert run_ranks(_train, 2, file, "infinipipe.data.path=/nowhere", stderr) == [2, 2]
    _check_last_words(stderr.read_text(), "data path '/nowhere' is neither a file nor")


def _train(rank: int, file: Path, override: str, stderr: Path) -> int:
    return exit_code(lambda: main(["train", "--deepspeed_config", str(file), override]), stderr)


def _check_last_words(said: str, expected: str) -> None:
    assert said.count(expected) == 1
    assert expected in said.strip().splitlines()[-1]
    assert "Traceback" not in said


_RECORDER = """#!/usr/bin/env bash
# writes down how it was called
name="$(basename "$0")"
{ printf '%s\\n' "$@"; } > "$RECORDS/$name.arguments"
env > "$RECORDS/$name.environment"
pwd > "$RECORDS/$name.folder"
"""


@dataclass
class _Machine:
    """A copy of launch/ beside a complete environment whose programs only write down their calls,
    and a folder to call it from."""

    root: Path
    records: Path
    here: Path

    @classmethod
    def build(cls, root: Path, *programs: str) -> _Machine:
        repository, here, records = root / "repository", root / "here", root / "records"
        programs_folder = repository / ".venv" / "bin"
        for folder in (programs_folder, here, records):
            folder.mkdir(parents=True)
        shutil.copytree(ROOT / "launch", repository / "launch")
        shutil.copy(ROOT / "pyproject.toml", repository)
        stamp = subprocess.run(
            "cksum < pyproject.toml | tr ' ' '-'",
            shell=True,
            cwd=repository,
            capture_output=True,
            text=True,
        )
        (repository / ".venv" / ".complete-").write_text(stamp.stdout)
        (programs_folder / "python").symlink_to(sys.executable)
        for program in programs:
            file = programs_folder / program
            file.write_text(_RECORDER)
            file.chmod(0o755)
        return cls(repository, records, here)

    def call(self, script: str, *arguments: str, **variables: str) -> None:
        path = f"{self.root / '.venv' / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(self.root / "launch" / script), *arguments],
            cwd=self.here,
            env={**os.environ, **variables, "RECORDS": str(self.records), "PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr

    def arguments(self, program: str) -> list[str]:
        return (self.records / f"{program}.arguments").read_text().splitlines()

    def environment(self, program: str) -> dict[str, str]:
        lines = (self.records / f"{program}.environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def test_train_sh_hands_the_launchers_options_and_the_runs_to_deepspeed(tmp_path: Path) -> None:
    machine = _Machine.build(tmp_path, "deepspeed")
    (machine.here / "run.json").write_text("{}")
    machine.call("train.sh", "--include", "localhost:0,1", "--", "run.json", "--steps", "3", "a=b")
    given = machine.arguments("deepspeed")
    port = given.pop(given.index("--master_port") + 1)
    assert 1024 < int(port) < 65536
    run = ["--module", "ds_infinipipe", "train", "--deepspeed_config"]
    assert given == [
        *["--hostfile", "/dev/null", "--no_local_rank", "--include", "localhost:0,1"],
        *["--master_port", *run, str(machine.here / "run.json"), "--steps", "3", "a=b"],
    ]
    assert (machine.records / "deepspeed.folder").read_text().strip() == str(machine.here)


def test_train_sh_leaves_the_port_to_the_launcher_where_nodes_have_to_agree(
    tmp_path: Path,
) -> None:
    machine = _Machine.build(tmp_path, "deepspeed")
    (machine.here / "run.json").write_text("{}")
    (machine.here / "hosts").write_text("one slots=2\ntwo slots=2\n")
    machine.call("train.sh", "run.json", HOSTFILE="hosts")
    given = machine.arguments("deepspeed")
    assert given[:3] == ["--hostfile", str(machine.here / "hosts"), "--no_local_rank"]
    assert "--master_port" not in given
    machine.call("train.sh", "--master_port", "29511", "--", "run.json")
    assert machine.arguments("deepspeed").count("--master_port") == 1


def test_the_hostfile_starts_every_node_by_the_deepspeed_launcher(tmp_path: Path) -> None:
    """DeepSpeed's own launcher, with stand-ins for what goes to other machines."""
    machine = _Machine.build(tmp_path, "pdsh")
    programs = machine.root / ".venv" / "bin"
    (programs / "ssh").write_text("#!/bin/sh\necho 10.1.2.3\n")
    (programs / "ssh").chmod(0o755)
    (programs / "deepspeed").symlink_to(Path(sys.executable).parent / "deepspeed")
    (machine.here / "run.json").write_text("{}")
    hosts = str(ROOT / "launch" / "hostfile.example")
    machine.call("train.sh", "run.json", "--steps", "3", HOSTFILE=hosts, **CPU)
    given = machine.arguments("pdsh")
    assert given[given.index("-w") + 1] == "node-1,node-2,node-3,node-4"
    joined = " ".join(given)
    world = json.loads(base64.urlsafe_b64decode(joined.split("--world_info=")[1].split()[0]))
    assert world == {f"node-{n}": list(range(8)) for n in range(1, 5)}
    assert "--node_rank=%n --master_addr=10.1.2.3 --master_port=29500" in joined
    file = machine.here / "run.json"
    assert joined.endswith(f"ds_infinipipe train --deepspeed_config {file} --steps 3")


def test_the_slurm_script_starts_an_agent_a_node_that_restarts_ranks(tmp_path: Path) -> None:
    machine = _Machine.build(tmp_path, "srun")
    scontrol = machine.root / ".venv" / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'gpu-07\\ngpu-08\\n'\n")
    scontrol.chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(machine.root),
        "SLURM_JOB_NODELIST": "gpu-[07-08]",
        "SLURM_JOB_ID": "4321",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "64",
    }
    machine.call("slurm.sbatch", "run.json", "--steps", "3", "a=b", **slurm)
    assert machine.arguments("srun") == [
        *["--kill-on-bad-exit=1", ".venv/bin/torchrun", "--nnodes", "2", "--nproc-per-node", "4"],
        *["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "4321"],
        *["--rdzv-endpoint", "gpu-07:24321", "-m", "ds_infinipipe", "train"],
        *["--deepspeed_config", "run.json", "--steps", "3", "a=b"],
    ]
    assert machine.environment("srun")["OMP_NUM_THREADS"] == "16"
    assert (machine.records / "srun.folder").read_text().strip() == str(machine.root)
    machine.call("slurm.sbatch", "run.json", **slurm, MAX_RESTARTS="0")
    assert "--max-restarts 0" in " ".join(machine.arguments("srun"))


def test_the_slurm_options_are_lines_slurm_reads() -> None:
    lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    # Slurm stops reading at the first line that is no comment
    head = lines[: next(i for i, line in enumerate(lines) if line and not line.startswith("#"))]
    options = [line.split()[1] for line in head if line.startswith("#SBATCH")]
    assert {"--ntasks-per-node=1", "--gpus-per-node=8", "--requeue"} <= set(options)
    assert sum(line.startswith("#SBATCH") for line in lines) == len(options)
