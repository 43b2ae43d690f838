"""Nothing of a stage's work is left on the CPU or waits for the device; without a device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("device_cases.py")


def test_a_stage_runs_on_a_device_of_fake_tensors() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr
    assert re.search(r"\d\d passed", run.stdout) and "skipped" not in run.stdout
