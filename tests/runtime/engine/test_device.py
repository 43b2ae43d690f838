"""Nothing of a stage's work is left on the CPU or waits for the device; without a device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from ranks import run_ranks

CASES = Path(__file__).with_name("device_cases.py")


class _Outcomes(Counter[str]):
    """Counts the tests of a run by how they ended."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self[report.outcome] += 1


def _run_cases(rank: int) -> dict[str, int]:
    outcomes = _Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", str(CASES)], plugins=[outcomes])
    return dict(outcomes)


@pytest.mark.ranks
def test_a_stage_runs_on_a_device_of_fake_tensors() -> None:
    [outcomes] = run_ranks(_run_cases, 1, timeout=280.0)
    assert set(outcomes) == {"passed"} and outcomes["passed"] > 20, outcomes
