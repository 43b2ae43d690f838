"""The GPU check's own code runs to its end in small, so that a GPU hour is not lost to a typo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
    )


@pytest.mark.ranks
def test_a_dry_run_ends_with_a_table_and_every_target_met(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    done = run("--dry-run", "--output", str(output))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
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
    met = [row["is_met"] for row in rows]
    assert met.count(True) >= 7 and met.count(False) == 0
    assert done.stdout.splitlines()[-1].startswith("layer")


def test_an_unknown_check_is_named() -> None:
    done = run("--dry-run", "--only", "loss,colour")
    assert done.returncode == 1 and "--only names ['colour']" in done.stderr
