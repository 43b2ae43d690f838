"""The GPU check's own code runs to its end in small, so that a GPU hour is not lost to a typo."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's modules, here and in the ranks."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def same_signals() -> Iterator[None]:
    """torch's agent leaves handlers of its own behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def dry_run(output: Path, *more: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["gpu_check.py", "--dry-run", "--output", str(output), *more])
        code = importlib.import_module("gpu_check").main()
    return code, printed.getvalue()


def _dry_run_without_ranks(rank: int, output: Path) -> tuple[int, str]:
    sys.path.insert(0, str(BENCHMARKS))
    with pytest.MonkeyPatch.context() as patch:
        # no rank can start others
        patch.setattr("gpu_check.check_two_ranks", lambda: iter(()))
        return dry_run(output)


def rows_met(output: Path, done: tuple[int, str], last: str) -> list[dict[str, Any]]:
    """What was written, after a look at the table of it: no target was missed."""
    code, printed = done
    assert code == 0, printed[-3000:]
    rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [row["is_met"] for row in rows].count(False) == 0
    lines = printed.splitlines()
    assert lines[-1].startswith(last)
    assert [line.split()[0] for line in lines[-len(rows) :]] == [
        r["check"].split()[0] for r in rows
    ]
    return rows


@pytest.mark.ranks
def test_a_dry_run_ends_with_a_table_and_every_target_met(
    tmp_path: Path, importable: None, same_signals: None
) -> None:
    """In a process of its own, but for the check that starts ranks."""
    output = tmp_path / "rows.json"
    (done,) = run_ranks(_dry_run_without_ranks, 1, output, timeout=250.0)
    rows = rows_met(output, done, "layer")
    rows += rows_met(output, dry_run(output, "--only", "two-ranks"), "two ranks")
    assert {row["check"] for row in rows} == {
        "attention",
        "loss",
        "head",
        "layer",
        "cost model",
        "two ranks",
        "training",
        "memory",
        "plain",
    }
    assert [row["is_met"] for row in rows].count(True) >= 7


def test_an_unknown_check_is_named(importable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry-run", "--only", "loss,colour"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module("gpu_check").main()
    # a text is what Python prints before it ends with exit code 1
    assert str(caught.value.code).startswith("--only names ['colour']; there are attention, ")
