"""What a step's report says of waits for communication and of memory, against what was done."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed
from ranks import run_ranks

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.ops import ulysses
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.engine.report import StageMemory, StepReport
from ds_infinipipe.runtime.ranks.clock import Wait
from ds_infinipipe.runtime.stage.meter import MemoryMeter

pytestmark = pytest.mark.ranks

_LATE_S = 0.4
_SHARDED = Case("llama", 1, 2, num_sequences=2, steps=1)
_PIPELINE = Case("llama", 2, 1, num_sequences=3, steps=1)


def _engine(case: Case, **debug: bool) -> InfiniPipeEngine:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    config = exactness.make_config(case)
    config["infinipipe"]["debug"] = debug
    return exactness.engine_from_config(config, case.dtype)


@contextmanager
def _late_once(owner: Any, name: str) -> Iterator[None]:
    """The first call of a function comes late."""
    function: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def late(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            time.sleep(_LATE_S)
        calls.append(1)
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, late):
        yield
    assert calls


def _step(engine: InfiniPipeEngine, case: Case) -> StepReport:
    batch = exactness.random_batch(case, 0)
    engine.train_plan(exactness.draw_plan(engine, case, batch, 0), batch)
    assert engine.report is not None
    return engine.report


def _lateness(rank: int, case: Case) -> list[tuple[Wait, float, StepReport]]:
    """What this rank waited for while the first one was late for each thing in turn."""
    engine = _engine(case)
    late = {
        Wait.GATHERS: (engine.sharding, "fetch"),
        Wait.REDUCTIONS: (engine.sharding, "flush"),
        Wait.ALL_TO_ALLS: (ulysses, "_dim_zero_all_to_all"),
    }
    if case.pp > 1:
        late = {Wait.TRANSFERS: (engine.channels.activations_out, "send")}
    found = []
    _step(engine, case)
    for kind, (owner, name) in late.items():
        torch.distributed.barrier()
        with _late_once(owner, name) if rank == 0 else nullcontext():
            report = _step(engine, case)
        found.append((kind, engine.waits.seconds()[kind], report))
    engine.close()
    return found


@pytest.mark.parametrize("case", [_SHARDED, _PIPELINE])
def test_whoever_waits_for_a_late_rank_reports_for_what(case: Case) -> None:
    first, second = run_ranks(_lateness, 2, case, timeout=90.0)
    assert len(first) == (3 if case.sp > 1 else 1)
    for (kind, own_s, report), (_, waited_s, same) in zip(first, second, strict=True):
        assert waited_s > 0.9 * _LATE_S, kind
        assert report.memory == same.memory
        rank_s = 2 * report.elapsed_s
        shares = report.waits
        assert set(shares) == set(Wait) and min(shares.values()) >= 0.0
        assert shares[kind] == pytest.approx((own_s + waited_s) / rank_s, rel=0.1)
        assert 0.0 < report.exposed_communication < 1.0
        assert f"exposed communication {report.exposed_communication:.0%}" in report.line()
        if case.sp == 1:
            assert shares[Wait.ALL_TO_ALLS] == 0.0


def _metered(rank: int) -> tuple[StepReport, int, int]:
    engine = _engine(_PIPELINE, meter_memory=True)
    assert not engine.before_step_hooks
    with MemoryMeter(engine.device, engine.before_step_hooks) as meter:
        report = _step(engine, _PIPELINE)
    assert not engine.before_step_hooks
    assert engine.plan is not None
    predicted = engine.plan.predicted.peak_bytes[engine.stage_id]
    engine.close()
    return report, meter.use.peak_bytes, predicted


def test_a_metered_step_reports_the_peak_of_each_stage_beside_what_was_predicted() -> None:
    found = run_ranks(_metered, 2, timeout=90.0)
    report = found[0][0]
    for stage, (_, measured, predicted) in zip(report.memory, found, strict=True):
        assert stage.measured == pytest.approx(measured, rel=0.01)
        assert stage.predicted == predicted
    fullest = report.measured_memory
    assert fullest in report.memory and fullest.measured == max(s.measured for s in report.memory)
    assert f"peak {fullest.measured / 2**30:.4g} GiB (predicted" in report.line()


def _unmetered(rank: int) -> StepReport:
    engine = _engine(_PIPELINE)
    try:
        return _step(engine, _PIPELINE)
    finally:
        engine.close()


def test_without_a_meter_no_measured_peak_is_claimed() -> None:
    report = run_ranks(_unmetered, 2, timeout=90.0)[0]
    assert report.measured_memory is None and "peak" not in report.line()
    assert all(isinstance(s, StageMemory) and s.predicted > 0 for s in report.memory)


def test_one_chunk_is_called_one_chunk() -> None:
    def line(num_batched: int) -> str:
        report = StepReport(
            step=1, loss=2.0, grad_norm=1.0, tokens=900, padding_tokens=0, sequences=3,
            without_label=0, chunks={"split": 0, "batched": num_batched, "hybrid": 0},
            pipelines=1, recomputed_layers=0, elapsed_s=1.0, simulated_s=1.0, predicted_s=1.0,
            bubble_ratio=0.1, predicted_bubble_ratio=0.1, solve_s=0.0, planning_wait_s=0.0,
            planning_fallback=False, planning_ahead=True,
        )  # fmt: skip
        return report.line()

    assert "| 1 chunk (0 split, 1 batched, 0 hybrid) in 1 pipeline |" in line(1)
    assert "| 2 chunks (0 split, 2 batched, 0 hybrid) in 1 pipeline |" in line(2)
