"""torchrun starts killed ranks again, and training goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_cases import CPU, free_port, make_corpus, processes_with, tiny_run, wait_until
from ranks import run_ranks, start_server
from torch.distributed import TCPStore
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from ds_infinipipe.cli import main
from ds_infinipipe.runtime.engine.record import load_step
from ds_infinipipe.runtime.engine.train import train
from ds_infinipipe.runtime.ranks.rendezvous import agree_on_start

STEPS = 8
SHARED_MEMORY = Path("/dev/shm")


def _config(corpus: Path, folder: Path, pp: int = 2) -> dict[str, Any]:
    config = tiny_run(corpus, f"infinipipe.parallel.pp={pp}", "infinipipe.parallel.sp=1")
    config["infinipipe"]["training"]["steps"] = STEPS
    config["infinipipe"]["runtime"]["timeout_s"] = 200.0
    # plans in a few milliseconds; what restarts is the same for all of them
    config["infinipipe"]["planner"] = {"mode": "paper", "solver": "greedy"}
    config["infinipipe"]["checkpoint"] = {"save_dir": str(folder / "saved"), "every_steps": 3}
    config["infinipipe"]["debug"] = {"dump_plans": str(folder / "plans")}
    return config


def _train(rank: int, config: dict[str, Any]) -> list[float]:
    return train(config)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The uninterrupted run: its folder and losses."""
    folder = tmp_path_factory.mktemp("plain")
    losses, _ = run_ranks(_train, 2, _config(corpus, folder), timeout=250.0)
    return folder, losses


def _training(folder: Path, config: dict[str, Any]) -> list[str]:
    """What torchrun is to start."""
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    return ["-m", "ds_infinipipe", "train", "--deepspeed_config", str(file)]


def _mark(folder: Path) -> str:
    """A variable that all programs of a run in `folder` have."""
    return f"INFINIPIPE_TEST={folder}"


def _run_agents(folder: Path, training: list[str], agents: list[list[str]], victim: int) -> str:
    """torchrun's agents, one a thread, with options of their own; what their ranks wrote.

    Ranks are forked, which saves each of them the seconds that a program takes to start; `victim`
    is killed in step 6.
    """
    ranks = _Ranks(folder, victim, folder / "plans" / "step-000005-replica-0.json")
    failures: list[BaseException] = []

    def run(options: list[str]) -> None:
        arguments = parse_args(["--start-method", "forkserver", *options, *training])
        config, _, rank_arguments = config_from_args(arguments)
        try:
            elastic_launch(config, ranks.main)(*rank_arguments)
        except BaseException as error:
            failures.append(error)

    start_server()
    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250.0)
    said = ranks.log.read_text()
    assert not any(thread.is_alive() for thread in threads), said
    assert failures == [], said
    assert multiprocessing.active_children() == []
    assert wait_until(lambda: not processes_with(_mark(folder)), 10.0)
    return said


@dataclass(frozen=True)
class _Ranks:
    """A run's forked ranks. The first to be rank `victim` dies once there is a file at `after`."""

    folder: Path
    victim: int
    after: Path

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def main(self, *arguments: str) -> int:
        """What `python -u -m ds_infinipipe ARGUMENTS` does."""
        assert arguments[:3] == ("-u", "-m", "ds_infinipipe")
        with open(self.log, "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update([_mark(self.folder).split("=", 1)])
        # agents count restarts on their own, and ranks change their numbers: a file says who it was
        was_here = self.folder / "victim"
        if os.environ["RANK"] == str(self.victim) and not was_here.exists():
            was_here.touch()
            threading.Thread(target=self._die, daemon=True).start()
        if code := main(arguments[3:]):
            raise SystemExit(code)
        return code

    def _die(self) -> None:
        wait_until(self.after.is_file, 300.0)
        os.kill(os.getpid(), signal.SIGKILL)


def _shared_files() -> set[str]:
    return {p.name for p in SHARED_MEMORY.iterdir() if not p.name.startswith("sem.mp-")}


def _left_behind(before: set[str]) -> set[str]:
    """Files in shared memory that came since, and that no process has any more.

    Other tests, which run beside this one, hold theirs.
    """
    found = _shared_files() - before
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):  # it ended, or is not ours
            held = maps.read_text()
            found = {name for name in found if str(SHARED_MEMORY / name) not in held}
    return found


_RESTART = ["--max-restarts", "1"]
_NODE = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]


@pytest.mark.ranks
@pytest.mark.waits
@pytest.mark.xdist_group("torchrun")  # one uninterrupted run for all
@pytest.mark.parametrize("is_one_node", [True, False], ids=["one node", "two nodes"])
def test_a_run_with_a_killed_rank_ends_as_the_uninterrupted_one(
    tmp_path: Path, corpus: Path, plain: tuple[Path, list[float]], is_one_node: bool
) -> None:
    """On one node with torchrun's default rendezvous."""
    before, port = _shared_files(), str(free_port())
    training = _training(tmp_path, _config(corpus, tmp_path))
    if is_one_node:
        agents, victim = [["--nproc-per-node", "2", "--master-port", port, *_RESTART]], 0
    else:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        agents, victim = [[*_NODE, *meeting, "--rdzv-id", "test", *_RESTART]] * 2, 1
    said = _run_agents(tmp_path, training, agents, victim)

    losses = _losses_of_resumed(said)
    assert losses == [(step, round(plain[1][step - 1], 4)) for step, _ in losses]
    _check_same_sequences(plain[0], tmp_path)
    _check_same_weights(plain[0], tmp_path)
    assert _left_behind(before) == set()


def _losses_of_resumed(said: str) -> list[tuple[int, float]]:
    """(step, loss) as logged, after a look at the steps: the last checkpoint was that of step 3."""
    assert "resumed from" in said
    found = re.findall(r"step (\d+) \| loss ([0-9.]+)", said)
    steps = [int(step) for step, _ in found]
    killed_in = len(steps) - (STEPS - 3)
    assert steps[killed_in:] == [*range(4, STEPS + 1)]
    assert killed_in in (5, 6) and steps[:killed_in] == [*range(1, killed_in + 1)]
    return [(int(step), float(loss)) for step, loss in found]


def _check_same_sequences(one: Path, other: Path) -> None:
    for step in range(1, STEPS + 1):
        name = f"plans/step-{step:06d}-replica-0.json"
        (_, left), (_, right) = load_step(one / name), load_step(other / name)
        assert all(np.array_equal(a, b) for a, b in zip(left.ids, right.ids, strict=True))


def _check_same_weights(one: Path, other: Path) -> None:
    """And optimizer states, bit for bit."""
    files = sorted((one / "saved" / f"global_step{STEPS}").glob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file.name


@pytest.mark.ranks
@pytest.mark.waits
def test_a_run_that_fails_in_every_restart_ends_with_the_cause(
    tmp_path: Path, corpus: Path
) -> None:
    """The program `torchrun`, whose ranks are programs as well."""
    options = ["--nproc-per-node", "2", *_RESTART, "--master-port", str(free_port())]
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "torchrun"),
            *options,
            *_training(tmp_path, _config(corpus, tmp_path, pp=3)),
        ],
        cwd=tmp_path,
        env={**os.environ, **CPU, **dict([_mark(tmp_path).split("=", 1)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    said = done.stdout
    message = "pp 3 x sp 1 x dp 1 = 3 ranks, but 2 were started"
    # once a start, and on a busy machine by the second rank too
    assert 2 <= len(re.findall(r"^infinipipe train \(rank \d\): .*" + message, said, re.M)) <= 4
    cause = said[said.index("Root Cause") :]
    assert message in cause and len(cause.splitlines()) < 12
    assert not processes_with(_mark(tmp_path))


def test_every_start_with_one_store_gets_a_name_of_its_own() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    names: list[set[str]] = []
    for attempt in range(3):
        found: dict[int, str] = {}

        def join(rank: int, found: dict[int, str] = found) -> None:
            store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20))
            found[rank] = agree_on_start(store, rank, 3, 20.0)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        # rank 0 is early once, late once and in the middle once: the others meet an old start first
        order = threads[attempt:] + threads[:attempt]
        for thread in order:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [0, 1, 2]
        names.append(set(found.values()))
    assert [len(name) for name in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3
