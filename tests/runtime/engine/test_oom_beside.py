"""Running out of memory beside something else: fp16's loss scale, a bad loss, saving, offload."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoint_cases
import pytest
import torch
from oom_cases import Fault, inject, make_engine, train_with_faults
from ranks import run_ranks

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import FLOAT32_LIMIT, Case
from ds_infinipipe.errors import NonFiniteError
from ds_infinipipe.runtime.checkpoint import tensor_file
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine

pytestmark = pytest.mark.ranks

_CASE = Case("llama", 2, 1, num_layers=2, num_sequences=4)


def _train(engine: InfiniPipeEngine, case: Case, step: int) -> float:
    batch = exactness.random_batch(case, step)
    return float(engine.train_plan(exactness.draw_plan(engine, case, batch, step), batch))


def _spoil_gradient(engine: InfiniPipeEngine) -> None:
    """An infinite gradient on the first stage only."""
    if engine.stage_id == 0:
        if engine.module.zero_stage == 3:
            engine.optimizer.grad_partitions_flat_buffer[3] = float("inf")
        else:
            next(engine.module.parameters()).grad.view(-1)[3] = float("inf")


# ---- fp16

_HALF_FAULTS = {
    1: Fault((1,), "forward"),
    2: Fault((0,), "sum", is_after=True),
    4: Fault((1,), "backward", times=2),
    6: Fault((0, 1), "begin"),
}
_OVERFLOWS = (2, 3, 6)


@dataclass(frozen=True)
class _Half:
    """One fp16 step: the scaler after it, and errors against float32 at equal weights."""

    scaler: dict[str, Any]
    skipped: int
    repeats: int
    loss_error: float
    norm_error: float


def _train_halves(rank: int, case: Case, fails: bool) -> list[_Half]:
    fp16 = {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 2}
    engine = make_engine(case, fp16=fp16)
    reference = exactness.Reference(engine, case)
    found = []
    for step in range(9):
        reference.copy_weights(engine)
        for weight in reference.model.parameters():
            weight.data.copy_(weight.data.half())
        wanted, norm = reference.run(exactness.random_batch(case, step))
        fault = _HALF_FAULTS.get(step) if fails else None
        repair = inject(engine, fault) if fault is not None else lambda: 0
        engine.before_step_hooks[:] = [_spoil_gradient] if step in _OVERFLOWS else []
        loss = _train(engine, case, step)
        repair()
        assert engine.report is not None
        found.append(
            _Half(
                {k: v for k, v in vars(engine.loss_scaler).items() if not callable(v)},
                engine.skipped_steps,
                engine.recovery.repeats,
                abs(loss - wanted),
                abs(engine.report.grad_norm - norm) / norm,
            )
        )
    engine.close()
    return found


def _train_halves_twice(rank: int, case: Case) -> tuple[list[_Half], list[_Half]]:
    return _train_halves(rank, case, True), _train_halves(rank, case, False)


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_a_repeated_fp16_step_counts_once_in_the_loss_scale(zero_stage: int) -> None:
    case = replace(_CASE, fp16=True, tied=True, zero_stage=zero_stage)
    for failed, smooth in run_ranks(_train_halves_twice, 2, case, timeout=150.0):
        assert [s.scaler for s in failed] == [s.scaler for s in smooth]
        assert [s.skipped for s in failed] == [s.skipped for s in smooth]
        assert [s.repeats > 0 for s in failed] == [step in _HALF_FAULTS for step in range(9)]
        assert len({s.scaler["cur_scale"] for s in failed}) > 2  # it has fallen and grown
        assert failed[-1].scaler["cur_iter"] == 9
        for step, outcome in enumerate(failed):
            assert outcome.loss_error < 1e-3
            assert step in _OVERFLOWS or outcome.norm_error < 2e-3


# ---- losses that are not finite


def _bad_loss(rank: int, folder: str, policy: str) -> tuple[list[str], list[int], int]:
    """Step 0 runs out of memory and is repeated, then its gradients are not finite; step 1 runs
    out of memory again."""
    training = {"failure_dir": folder, "on_nonfinite": policy}
    engine = make_engine(_CASE, section={"training": training})
    messages, repeats = [], []
    for step in range(3):
        engine.before_step_hooks[:] = [_spoil_gradient] if step == 0 else []
        repair = inject(engine, Fault((step % 2,), "backward" if step < 2 else "forward"))
        try:
            _train(engine, _CASE, step)
        except NonFiniteError as error:
            messages.append(str(error))
        repair()
        repeats.append(engine.recovery.repeats)
    engine.close()
    return messages, repeats, engine.skipped_steps


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_repeated_step_with_bad_gradients_is_handled_once_and_later_ones_recover(
    policy: str, tmp_path: Path
) -> None:
    for messages, repeats, skipped in run_ranks(_bad_loss, 2, str(tmp_path), policy, timeout=90.0):
        assert len(messages) == (policy == "stop")
        assert skipped == (policy == "skip")
        assert repeats == [1, 1, 1]
    assert {p.stem for p in tmp_path.glob("*.json")} == {"step-000001-replica-0"}


# ---- a checkpoint that is being written


def _save_beside(rank: int, folder: str) -> tuple[int, bool, list[str]]:
    engine = make_engine(_CASE, section={"checkpoint": {"asynchronous": True}})
    _train(engine, _CASE, 0)
    saved = checkpoint_cases.snapshot(engine)
    gate, write = threading.Event(), tensor_file.write_tensors

    def write_late(*args: Any) -> Any:
        assert gate.wait(60.0)
        return write(*args)

    tensor_file.write_tensors = write_late
    engine.save_checkpoint(folder, tag="beside")
    inject(engine, Fault((1,), "backward"))
    _train(engine, _CASE, 1)
    repeats = engine.recovery.repeats
    gate.set()
    engine.wait_for_checkpoint()
    tensor_file.write_tensors = write
    place, _ = engine.load_checkpoint(folder, "beside")
    now = checkpoint_cases.snapshot(engine)
    wrong = checkpoint_cases.differences(engine, Path(place))
    engine.close()
    return repeats, all(torch.equal(saved[key], now[key]) for key in saved), wrong


def test_a_checkpoint_that_is_being_written_holds_the_state_before_the_repeated_step(
    tmp_path: Path,
) -> None:
    for repeats, equal, wrong in run_ranks(_save_beside, 2, str(tmp_path), timeout=90.0):
        assert repeats == 1 and equal and wrong == []


# ---- what only some engines have


@pytest.mark.parametrize(
    ("case", "faults"),
    [
        (
            replace(_CASE, offload=True, seed=3),
            [Fault((0,), "backward"), Fault((1,), "sum", is_after=True), None],
        ),
        (
            Case("llama", 1, 1, dp=2, num_layers=2, num_sequences=2, zero_stage=0, seed=7),
            [Fault((0, 1), "forward"), Fault((1,), "sum"), None],
        ),
    ],
    ids=["offload", "replicas alone"],
)
def test_offloaded_states_and_lone_replicas_survive_it(
    case: Case, faults: list[Fault | None]
) -> None:
    for outcomes in run_ranks(_faulty, 2, case, faults, timeout=90.0):
        for outcome, fault in zip(outcomes, faults, strict=True):
            assert (outcome.repeats > 0) == (fault is not None)
            assert outcome.loss_error <= FLOAT32_LIMIT, (fault, outcome)
            assert outcome.gradient_error <= FLOAT32_LIMIT, (fault, outcome)


def _faulty(rank: int, case: Case, faults: list[Fault | None]) -> Any:
    return train_with_faults(case, faults)
