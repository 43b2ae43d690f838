"""torchrun starts killed ranks again, and training goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_cases import CPU, free_port, make_corpus, processes_with, tiny_run, wait_until
from ranks import run_ranks
from torch.distributed import TCPStore

from ds_infinipipe.runtime.record import load_step
from ds_infinipipe.runtime.rendezvous import agree_on_start
from ds_infinipipe.runtime.train import train

STEPS = 14
SHARED_MEMORY = Path("/dev/shm")


def _config(corpus: Path, folder: Path) -> dict[str, Any]:
    config = tiny_run(corpus, "infinipipe.parallel.pp=2", "infinipipe.parallel.sp=1")
    config["infinipipe"]["training"]["steps"] = STEPS
    config["infinipipe"]["runtime"]["timeout_s"] = 200.0
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


class _Torchrun:
    """Agents of one run in `folder`; `options` of every agent."""

    def __init__(self, folder: Path, config: dict[str, Any], *options: list[str]) -> None:
        self.mark = f"INFINIPIPE_TEST={folder}"
        self.log = folder / "log"
        file = folder / "run.json"
        file.write_text(json.dumps(config))
        program = str(Path(sys.executable).parent / "torchrun")
        training = ["-m", "ds_infinipipe", "train", "--deepspeed_config", str(file)]
        with open(self.log, "w") as log:
            self.agents = [
                subprocess.Popen(
                    [program, *more, *training],
                    cwd=folder,
                    env={**os.environ, **CPU, **dict([self.mark.split("=", 1)])},
                    stdout=log,
                    stderr=log,
                )
                for more in options
            ]

    def kill_rank(self, rank: int, after: Path) -> None:
        """As soon as there is a file at `after`."""
        assert wait_until(after.is_file, 300.0), self.log.read_text()
        for pid, variables in processes_with(self.mark).items():
            # its planning worker has the same variables, but another parent
            if variables.get("RANK") == str(rank) and _parent(pid) in [a.pid for a in self.agents]:
                os.kill(pid, signal.SIGKILL)

    def end(self) -> str:
        """What all of them wrote, after they ended well and left nothing behind."""
        try:
            codes = [agent.wait(300.0) for agent in self.agents]
        finally:
            for pid in processes_with(self.mark) if self._any_running() else ():
                os.kill(pid, signal.SIGKILL)
        said = self.log.read_text()
        assert codes == [0] * len(codes), said
        assert wait_until(lambda: not processes_with(self.mark), 10.0), processes_with(self.mark)
        return said

    def _any_running(self) -> bool:
        return any(agent.poll() is None for agent in self.agents)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _shared_files() -> set[str]:
    return {p.name for p in SHARED_MEMORY.iterdir() if not p.name.startswith("sem.mp-")}


_NODE = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
_RUNS = {
    "one node, torchrun's default rendezvous": ([["--nproc-per-node", "2"]], 0),
    "two nodes, one rank each": ([_NODE, _NODE], 1),
}


@pytest.mark.ranks
@pytest.mark.parametrize(("agents", "victim"), _RUNS.values(), ids=list(_RUNS))
def test_a_run_with_a_killed_rank_ends_as_the_uninterrupted_one(
    tmp_path: Path,
    corpus: Path,
    plain: tuple[Path, list[float]],
    agents: list[list[str]],
    victim: int,
) -> None:
    before, port = _shared_files(), free_port()
    meeting = ["--max-restarts", "1", "--master-port", str(port)]
    if len(agents) > 1:
        where = f"127.0.0.1:{port}"
        meeting[2:] = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-id", "test"]
    run = _Torchrun(tmp_path, _config(corpus, tmp_path), *([*a, *meeting] for a in agents))
    run.kill_rank(victim, after=tmp_path / "plans" / "step-000005-replica-0.json")
    said = run.end()

    assert "resumed from" in said
    steps = dict(re.findall(r"step (\d+) \| loss ([0-9.]+)", said))
    assert steps == {str(i + 1): f"{loss:.4f}" for i, loss in enumerate(plain[1])}
    _check_same_sequences(plain[0], tmp_path)
    _check_same_weights(plain[0], tmp_path)
    assert _shared_files() <= before


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
def test_a_run_that_fails_in_every_restart_ends_with_the_cause(
    tmp_path: Path, corpus: Path
) -> None:
    options = ["--nproc-per-node", "2", "--max-restarts", "2", "--master-port", str(free_port())]
    config = _config(corpus, tmp_path)
    config["infinipipe"]["parallel"]["pp"] = 3
    run = _Torchrun(tmp_path, config, options)
    assert run.agents[0].wait(300.0) == 1
    said = run.log.read_text()
    message = "pp 3 x sp 1 x dp 1 = 3 ranks, but 2 were started"
    assert len(re.findall(r"^infinipipe train \(rank 0\): .*" + message, said, re.M)) == 3
    cause = said[said.index("Root Cause") :]
    assert message in cause and len(cause.splitlines()) < 12
    assert not processes_with(run.mark)


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
