"""fp16's loss scale: found, lowered at overflows, raised again, saved; and what it cannot cure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_cases
import numpy as np
import pytest
import torch
from ranks import run_strict

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine

pytestmark = pytest.mark.ranks

_CASE = Case("llama", 2, 1, fp16=True, tied=True, num_layers=2, clip=0.1)


def _build(case: Case, folder: str = "", **fp16: Any) -> InfiniPipeEngine:
    checkpoint_cases.quiet()
    config = exactness.make_config(case)
    if folder:
        config["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "csv"}
    config["fp16"].update(fp16)
    config["infinipipe"]["training"] = {"failure_dir": folder, "on_nonfinite": "skip"}
    return exactness.engine_from_config(config, case.dtype)


def _train(engine: InfiniPipeEngine, case: Case, step: int) -> None:
    batch = exactness.random_batch(case, step)
    engine.train_plan(exactness.draw_plan(engine, case, batch, step), batch)


def _overflow(engine: InfiniPipeEngine) -> None:
    """Infinite gradients on the first stage only."""
    if engine.stage_id == 0:
        _, parameter = next(iter(engine.module.hf_parameters()))
        if engine.module.zero_stage == 3:
            engine.optimizer.grad_partitions_flat_buffer[3] = float("inf")
        else:
            parameter.grad.view(-1)[3] = float("inf")


def _scales(rank: int, case: Case) -> list[tuple[float, float, int, bool]]:
    """Per step: scale after it, relative error of the norm, steps skipped, weights moved."""
    engine = _build(case, initial_scale_power=26, loss_scale_window=2, hysteresis=1)
    reference = exactness.Reference(engine, case)
    found = []
    _, parameter = next(iter(engine.module.hf_parameters()))
    for step in range(16):
        reference.copy_weights(engine)
        for weight in reference.model.parameters():
            weight.data.copy_(weight.data.half())
        _, wanted = reference.run(exactness.random_batch(case, step))
        engine.before_step_hooks[:] = [_overflow] if step == 14 else []
        before = exactness.full_weight(engine, parameter)
        _train(engine, case, step)
        moved = bool((exactness.full_weight(engine, parameter) != before).any())
        assert engine.report is not None
        error = abs(engine.report.grad_norm - wanted) / wanted
        found.append((float(engine.loss_scaler.cur_scale), error, engine.skipped_steps, moved))
    engine.close()
    return found


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_the_scale_falls_until_gradients_fit_and_grows_again_without_touching_the_norm(
    zero_stage: int,
) -> None:
    everyone = run_strict(_scales, 2, replace(_CASE, zero_stage=zero_stage), timeout=150.0)
    assert [[s[0], s[2], s[3]] for s in everyone[0]] == [[s[0], s[2], s[3]] for s in everyone[1]]
    scale, skipped, grown = 2.0**26, 0, 0
    for after, error, skipped_now, moved in everyone[0]:
        if skipped_now > skipped:
            assert after == scale / 2 and not moved and np.isnan(error)
        else:
            assert after in (scale, 2 * scale) and moved and error < 2e-3
            grown += after == 2 * scale
        scale, skipped = after, skipped_now
    assert skipped >= 3 and grown >= 1
    assert everyone[0][14][2] == everyone[0][13][2] + 1  # an overflow on one stage, skipped by all


def _incurable(rank: int, folder: str) -> list[float]:
    def poison_loss(engine: InfiniPipeEngine) -> None:
        if engine.is_last_stage():
            engine.executor._losses.append(torch.tensor(float("nan"), dtype=torch.float64))

    scales = []
    engine = _build(_CASE, folder, initial_scale_power=4, min_loss_scale=8, hysteresis=2)
    for step, hook in enumerate([_overflow, _overflow, _overflow, poison_loss]):
        engine.before_step_hooks[:] = [hook]
        _train(engine, _CASE, step)
        scales.append(engine.loss_scaler.cur_scale)
    assert engine.skipped_steps == 4
    engine.close()
    return scales


def test_an_overflow_at_the_smallest_scale_and_a_bad_loss_are_for_the_nonfinite_policy(
    tmp_path: Path,
) -> None:
    for scales in run_strict(_incurable, 2, str(tmp_path), timeout=90.0):
        assert scales == [16.0, 8.0, 8.0, 8.0]  # the first overflow is forgiven: hysteresis 2
    handled = {path.stem for path in tmp_path.glob("step-*")}
    assert handled == {"step-000003-replica-0", "step-000004-replica-0"}
    for tag, last in (("loss_scale", 8.0), ("skipped_steps", 4.0)):
        rows = (tmp_path / "csv" / f"Train_InfiniPipe_{tag}.csv").read_text().split()
        assert float(rows[-1].split(",")[-1]) == last


def _resume(rank: int, folder: str) -> tuple[dict[str, Any], dict[str, Any], list[str], bool]:
    settings = {"initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 2}
    engine = _build(_CASE, **settings)
    for step in range(6):
        engine.before_step_hooks[:] = [_overflow] if step in (1, 2, 5) else []
        _train(engine, _CASE, step)
    engine.save_checkpoint(folder)
    engine.before_step_hooks[:] = []
    _train(engine, _CASE, 6)
    after = checkpoint_cases.snapshot(engine)
    engine.close()

    other = _build(replace(_CASE, zero_stage=0, pp=1, sp=2), **settings)
    place, _ = other.load_checkpoint(folder)
    loaded = dict(vars(other.loss_scaler))
    wrong = checkpoint_cases.differences(other, Path(place))
    other.close()

    same = _build(_CASE, **settings)
    same.load_checkpoint(folder)
    assert same.skipped_steps == 3
    scale_then = dict(vars(same.loss_scaler))
    _train(same, _CASE, 6)
    again = checkpoint_cases.snapshot(same)
    same.close()
    equal = all(torch.equal(tensor, after[key]) for key, tensor in again.items())
    return scale_then, loaded, wrong, equal


def test_the_scale_is_saved_and_restored_bit_for_bit_at_any_layout(tmp_path: Path) -> None:
    for same, other, wrong, equal in run_strict(_resume, 2, str(tmp_path), timeout=150.0):
        state = {k: v for k, v in same.items() if not callable(v)}
        assert state["cur_scale"] == 256.0  # hysteresis forgives the first overflow of three
        assert state["cur_hysteresis"] == 1 and state["cur_iter"] == 6
        assert other == same and wrong == [] and equal
