"""The harness that runs a function on several gloo ranks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankFailure, left_behind, run_ranks

from ds_infinipipe.checks.exactness import Case, compare_steps
from ds_infinipipe.planner.plan import lower

pytestmark = pytest.mark.ranks


def _sum_of_ranks(rank: int, scale: float) -> torch.Tensor:
    value = torch.tensor([scale * rank], dtype=torch.float64)
    torch.distributed.all_reduce(value)
    return value


def _fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("missing layer")
    torch.distributed.barrier()


def _die_on_rank_one(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(60)


def _sleep(rank: int) -> None:
    time.sleep(60)


def test_every_rank_takes_part_in_a_collective() -> None:
    results = run_ranks(_sum_of_ranks, 3, 2.0)
    assert [r.item() for r in results] == [6.0, 6.0, 6.0]


def test_the_first_failure_is_raised_with_the_ranks_traceback() -> None:
    with pytest.raises(KeyError, match="missing layer") as caught:
        run_ranks(_fail_on_rank_one, 2)
    assert isinstance(caught.value.__cause__, RankFailure)
    assert "rank 1" in str(caught.value.__cause__)
    assert "_fail_on_rank_one" in str(caught.value.__cause__)


@pytest.mark.waits
def test_a_rank_that_dies_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 ended without an answer"):
        run_ranks(_die_on_rank_one, 2)
    assert time.monotonic() - started < 30


@pytest.mark.waits
def test_ranks_that_hang_are_named_and_ended() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] in 3 s"):
        run_ranks(_sleep, 2, timeout=3)
    assert left_behind() == {}


def _sleep_beside_a_child(rank: int) -> None:
    program = "import time; print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # a process has no environment to be known by while it is loaded
    raise KeyError("gone, but not the child")


@pytest.mark.waits
def test_what_a_rank_leaves_behind_is_found() -> None:
    with pytest.raises(KeyError):
        run_ranks(_sleep_beside_a_child, 1)
    found = left_behind(timeout_s=1.0)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    assert ["time.sleep(600)" in command for command in found.values()] == [True]
    assert left_behind() == {}


def _change_everything(rank: int) -> None:
    os.environ["INFINIPIPE_TEST_LEAK"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    lower.lower_plan = None  # type: ignore[assignment]


def _what_is_there(rank: int) -> tuple[Any, ...]:
    leak = os.environ.get("INFINIPIPE_TEST_LEAK")
    return leak, torch.get_default_dtype(), torch.initial_seed(), callable(lower.lower_plan)


def test_nothing_of_one_run_reaches_the_next() -> None:
    before = run_ranks(_what_is_there, 2)
    run_ranks(_change_everything, 2)
    assert run_ranks(_what_is_there, 2) == before


def _train(rank: int, case: Case) -> tuple[int, int, list[str]]:
    """Objects the collector leaves alone, this process, and modules that training imports."""
    before = set(sys.modules)
    compare_steps(case)
    return gc.get_freeze_count(), os.getpid(), sorted(set(sys.modules) - before)


def test_ranks_start_with_all_that_an_engine_imports_and_leave_nothing_behind() -> None:
    case = Case("llama", 2, 1, num_layers=2, steps=1)
    shared = []
    for frozen, pid, imported in run_ranks(_train, 2, case):
        assert frozen > 100_000
        assert len(imported) < 10, imported
        shared += Path("/dev/shm").glob(f"*_{pid}_*")
    assert shared == [] and left_behind() == {}
