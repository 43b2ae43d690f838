"""Long runs: numbers that are not finite, stalls, requests to stop, recorded steps, monitors."""

from __future__ import annotations

import csv
import logging
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from planner_cases import setup_of
from ranks import run_strict

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.errors import ConfigError, DataError, NonFiniteError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.plan import PLAN_VERSION
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.engine.record import load_step, save_step
from ds_infinipipe.runtime.engine.replay import replay
from ds_infinipipe.runtime.engine.watchdog import Activity, Watchdog
from ds_infinipipe.runtime.stage.batch import StepBatch

pytestmark = pytest.mark.ranks

_CASE = Case("llama", 2, 1, num_layers=2, steps=3)


def _engine(**section: dict[str, object]) -> InfiniPipeEngine:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    config = exactness.make_config(_CASE)
    for name, values in section.items():
        config["infinipipe"].setdefault(name, {}).update(values)
    return exactness.engine_from_config(config, _CASE.dtype)


def _train(engine: InfiniPipeEngine, step: int) -> float:
    batch = exactness.random_batch(_CASE, step)
    return float(engine.train_plan(exactness.draw_plan(engine, _CASE, batch, step), batch))


def _poison(engine: InfiniPipeEngine) -> None:
    """Make the gradients of one stage infinite, as an overflow would."""
    if engine.stage_id == 0:
        engine.optimizer.grad_partitions_flat_buffer[3] = float("inf")


def _nonfinite(rank: int, policy: str, folder: str) -> tuple[str, list[float], int]:
    engine = _engine(training={"on_nonfinite": policy, "failure_dir": folder})
    norms, message = [], ""
    name, parameter = next(iter(engine.module.hf_parameters()))
    try:
        for step in range(3):
            engine.before_step_hooks[:] = [_poison] if step == 1 else []
            before = exactness.full_weight(engine, parameter)
            _train(engine, step)
            moved = bool((exactness.full_weight(engine, parameter) != before).any())
            assert moved == (step != 1), name
            assert engine.report is not None
            norms.append(engine.report.grad_norm)
    except NonFiniteError as error:
        message = str(error)
    engine.close()
    return message, norms, engine.skipped_steps


def test_a_step_with_infinite_gradients_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    for message, norms, skipped in run_strict(_nonfinite, 2, "skip", str(tmp_path), timeout=90.0):
        assert not message and skipped == 1
        assert np.isnan(norms[1]) and np.isfinite([norms[0], norms[2]]).all()
    plan, batch = load_step(next(tmp_path.glob("*.json")))
    assert batch.lengths == plan.lengths


def test_a_step_with_infinite_gradients_stops_all_ranks_and_is_saved(tmp_path: Path) -> None:
    for message, norms, _ in run_strict(_nonfinite, 2, "stop", str(tmp_path), timeout=90.0):
        assert "step 2: the gradients are not finite on 1 of 2 ranks" in message
        assert len(norms) == 1
    assert len(list(tmp_path.glob("step-000002-replica-0.*"))) == 2


def _stop(rank: int) -> list[bool]:
    engine = _engine()
    found = []
    for step in range(2):
        if rank == 1 and step == 1:
            engine.request_stop()
        _train(engine, step)
        found.append(engine.stop_requested)
    engine.close()
    return found


def test_a_request_to_stop_on_one_rank_is_seen_by_all_after_the_step() -> None:
    assert run_strict(_stop, 2, timeout=90.0) == [[False, True], [False, True]]


def _stall(rank: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_infinipipe.runtime.engine.watchdog").addHandler(handler)
    engine = _engine(runtime={"watchdog_s": 0.5})
    _train(engine, 0)
    messages.clear()
    if rank == 0:
        forward = engine.executor.forward

        def forward_late(*args):  # type: ignore[no-untyped-def]
            engine.executor.forward = forward  # type: ignore[method-assign]
            time.sleep(2.0)
            return forward(*args)

        engine.executor.forward = forward_late  # type: ignore[method-assign]
    _train(engine, 1)
    engine.close()
    return messages


@pytest.mark.waits
def test_the_watchdog_names_instruction_chunk_and_peer_of_every_stalled_rank() -> None:
    sleeping, waiting = run_strict(_stall, 2, timeout=90.0)
    assert any("rank 0 (stage 0" in m and "instruction 0" in m for m in sleeping)
    assert any("rank 1 (stage 1" in m and "ranks [0]" in m and "'F" in m for m in waiting)


def test_the_watchdog_is_silent_between_steps_and_ends() -> None:
    calls = []

    def current() -> Activity | None:
        calls.append(1)
        return None

    watchdog = Watchdog(current, 0.05)
    time.sleep(0.2)
    watchdog.stop()
    count = len(calls)
    time.sleep(0.1)
    assert count > 0 and len(calls) == count


def _record_and_replay(rank: int, folder: str) -> tuple[float, list[float], str]:
    engine = _engine()
    batch = exactness.random_batch(_CASE, 0)
    plan = exactness.draw_plan(engine, _CASE, batch, 0)
    loss = float(engine.train_plan(plan, batch))
    engine.close()
    if rank == 0:
        save_step(folder, "one", plan, batch)
    torch.distributed.barrier()
    config = exactness.make_config(_CASE)
    config["infinipipe"]["runtime"]["deterministic"] = True
    assert not torch.are_deterministic_algorithms_enabled()
    again = replay(config, f"{folder}/one.json", times=2)
    assert torch.are_deterministic_algorithms_enabled()
    config["infinipipe"]["model"]["config"]["num_hidden_layers"] = 4
    try:
        replay(config, f"{folder}/one.json")
    except ConfigError as error:
        return loss, again, str(error)
    return loss, again, ""


def test_a_recorded_step_replays_with_the_same_loss_and_only_in_its_layout(tmp_path: Path) -> None:
    for loss, (again, later), message in run_strict(
        _record_and_replay, 2, str(tmp_path), timeout=90.0
    ):
        assert again == loss
        assert later < loss  # the first replay took an optimizer step
        assert "was planned for" in message


def test_a_recorded_step_without_its_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_step(tmp_path / "none.json")


def test_a_recorded_step_that_was_cut_off_is_refused_as_bad_input(tmp_path: Path) -> None:
    for name in ("step.json", "step.npz"):
        (tmp_path / name).write_text('{"version": 3, ')
    with pytest.raises(
        DataError, match=rf"step\.json: not a plan file of version {PLAN_VERSION} .*plan the"
    ):
        load_step(tmp_path / "step.json")


def test_a_recorded_step_whose_plan_states_another_time_is_refused(tmp_path: Path) -> None:
    model = ModelSpec("tiny", 2, 32, 48, 4, 4, 8, 50)
    layout, cluster = make_layout(model, 2, 1), BUILTIN_CLUSTERS["cpu-local"]
    plan = plan_batch([9, 4, 7], setup_of(model, layout, cluster))
    arrays = tuple(np.zeros(n, dtype=np.int64) for n in plan.lengths)
    batch = StepBatch(arrays, arrays)
    save_step(tmp_path, "true", plan, batch)
    assert load_step(tmp_path / "true.json")[0] == plan
    faster = replace(plan, predicted=replace(plan.predicted, step_time_s=1e-9))
    save_step(tmp_path, "false", faster, batch)
    with pytest.raises(DataError, match=r"false\.json: the plan states a step time of 1e-09 s"):
        load_step(tmp_path / "false.json")


def _monitored(rank: int, folder: str) -> None:
    config = exactness.make_config(_CASE)
    config["infinipipe"]["debug"] = {"meter_memory": True}
    config["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "job"}
    engine = exactness.engine_from_config(config, _CASE.dtype)
    for step in range(2):
        _train(engine, step)
    engine.close()


def test_deepspeeds_csv_monitor_receives_the_steps_figures(tmp_path: Path) -> None:
    run_strict(_monitored, 2, str(tmp_path), timeout=90.0)
    names = {p.name for p in (tmp_path / "job").glob("*.csv")}
    expected = "loss tokens_per_s bubble_ratio model_flops_utilisation skipped_steps "
    expected += "exposed_communication exposed_transfers peak_gib predicted_peak_gib "
    for tag in (expected + "peak_over_predicted").split():
        assert f"Train_InfiniPipe_{tag}.csv" in names
    rows = list(csv.reader((tmp_path / "job" / "Train_InfiniPipe_loss.csv").open()))
    assert len(rows) == 3  # a heading and two steps
