"""A run that fails: one rank prints the error, each other a line that refers to it."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import time
from pathlib import Path

import pytest
from programs import exit_code
from ranks import run_ranks

from ds_infinipipe.errors import DataError, NonFiniteError, PeerTimeoutError
from ds_infinipipe.runtime.ranks.last_words import LastWords, refer
from ds_infinipipe.runtime.ranks.store import Board

pytestmark = pytest.mark.ranks


def _failures(rank: int) -> dict[str, BaseException | None]:
    """By scenario, what ends rank 0, 1 or 2; None for a rank that does not fail in it."""
    lost = PeerTimeoutError("the connection closed")
    return {
        "agreed": refer(NonFiniteError("the loss is not finite"), 1),
        "the same": DataError("no such file"),
        "one of them": ValueError("a bug") if rank == 2 else lost,
        "the first": ValueError("a bug") if rank == 0 else lost,
        "killed": None if rank == 1 else lost,
        "each its own": ValueError(f"bug {rank}"),
    }


def _print_failures(rank: int) -> dict[str, tuple[str, int]]:
    """What this rank prints in each scenario, and its exit code."""
    before, printed = sys.excepthook, {}
    for name, error in _failures(rank).items():
        board = Board(name, 20.0)
        if name in ("one of them", "the first") and isinstance(error, PeerTimeoutError):
            _wait_for_cause(board)  # a connection breaks after that was written
        hook = LastWords(board, rank, 3, lambda: None)
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            if error is not None:
                hook(type(error), error, None)
        text = stream.getvalue().strip().removeprefix(f"[rank{rank}]: ")  # torch's hook says so
        printed[name] = text, getattr(error, "exit_code", 1)
    assert sys.excepthook is before
    return printed


def test_one_rank_prints_the_error_and_the_others_refer_to_it() -> None:
    by_rank = run_ranks(_print_failures, 3, timeout=60.0)
    agreed, same, one, first, killed, own = (
        [printed[name] for printed in by_rank] for name in _failures(0)
    )
    whole = "ds_infinipipe.errors.NonFiniteError: the loss is not finite"
    assert [text for text, _ in agreed] == [
        "rank 0 ends: rank 1 reports the NonFiniteError",
        whole,
        "rank 2 ends: rank 1 reports the NonFiniteError",
    ]
    texts = [text for text, _ in same]
    assert texts.count("ds_infinipipe.errors.DataError: no such file") == 1
    assert sum("reports the same DataError" in text for text in texts) == 2
    assert one == [
        ("rank 0 ends: rank 2 reports ValueError: a bug", 1),
        ("rank 1 ends: rank 2 reports ValueError: a bug", 1),
        ("ValueError: a bug", 1),
    ]
    assert first[0] == ("ValueError: a bug", 1)
    assert first[1][0] == "rank 1 ends: rank 0 reports ValueError: a bug"
    lost = "ds_infinipipe.errors.PeerTimeoutError: the connection closed"
    assert [text for text, _ in killed] == [lost, "", lost]
    assert [text for text, _ in own] == [f"ValueError: bug {rank}" for rank in range(3)]


def test_a_rank_that_refers_to_another_ends_with_its_exit_code() -> None:
    assert run_ranks(_exit_codes, 2, timeout=60.0) == [2, 2]


def _wait_for_cause(board: Board) -> None:
    while not board.read("cause"):
        time.sleep(0.01)


def _exit_codes(rank: int) -> int:
    board = Board("codes", 20.0)
    error = DataError("a bad file") if rank == 0 else PeerTimeoutError("the connection closed")
    if rank == 1:
        _wait_for_cause(board)
    with contextlib.redirect_stderr(io.StringIO()):
        LastWords(board, rank, 2, lambda: None)(type(error), error, None)
    return error.exit_code


_SCRIPT = """
import numpy as np
import torch
import ds_infinipipe
from ds_infinipipe.checks.exactness import Case, make_config

config = make_config(Case("llama", 2, 1, num_layers=2))
model = ds_infinipipe.InfiniPipeModule(config)
engine = ds_infinipipe.initialize(model=model, config=config)[0]
batches = iter([[{"input_ids": np.arange(length)} for length in (20, 31, 5)]] * 3)
engine.train_batch(batches)
if torch.distributed.get_rank() == 0:
    print(engine.report.losss)  # the mistake
engine.train_batch(batches)
"""


def _run_script(rank: int, script: Path, output: Path) -> int:
    return exit_code(lambda: runpy.run_path(str(script), run_name="__main__"), output)


@pytest.mark.waits
def test_a_mistake_on_one_rank_is_the_last_thing_the_ranks_of_a_script_print(
    tmp_path: Path,
) -> None:
    script, output = tmp_path / "own_loop.py", tmp_path / "stderr"
    script.write_text(_SCRIPT)
    codes = run_ranks(_run_script, 2, script, output, timeout=120.0)
    text = output.read_text()
    assert codes == [1, 1], text
    cause = "AttributeError: 'StepReport' object has no attribute 'losss'"
    *_, last_but_one, last = text.strip().splitlines()
    assert last_but_one.startswith("[rank0]: ") and cause in last_but_one
    assert last.startswith(f"rank 1 ends: rank 0 reports {cause}")
    assert "PeerTimeoutError" not in text
