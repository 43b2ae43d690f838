"""The benchmark of the order of transfers counts and times what it says, in small."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("transfer_order")


def test_late_receives_cost_hosts_that_run_ahead_nothing(benchmark: Any) -> None:
    row = benchmark.measure_cost("github-a", 4)
    assert abs(row["cost, hosts ahead"]) <= benchmark.MOST_COST
    assert 0.0 <= row["cost, hosts in step"] < 0.01


def test_no_order_hangs_now_and_some_did(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SHORT", ([4096],))
    counts = benchmark.count_hangs(4)
    assert sum(found["orders"] for found in counts.values()) == 4 + 2 * 3 * 2
    for found in counts.values():
        for event in ("channels connect", "devices are waited for"):
            assert found[f"now hang where {event}"] == 0
            assert found[f"evaluation hang where {event}"] == 0
    assert sum(found["early hang where devices are waited for"] for found in counts.values()) > 0
