"""An optimizer in host memory trains the same, and its checkpoints are everybody's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import checkpoint_cases
import pytest
import torch
from planner_cases import setup_of
from ranks import run_strict

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import FLOAT32_LIMIT, Case, StepDifference
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.state_bytes import reduce_bucket_elements

_CASE = Case("llama", 2, 1, 2, tied=True, offload=True, num_layers=2)


def _compare(rank: int, case: Case) -> tuple[list[StepDifference], list[float], list[float]]:
    checkpoint_cases.quiet()
    return exactness.compare_steps(case), *exactness.reference_curve(replace(case, seed=1, steps=6))


@pytest.mark.ranks
def test_gradients_norm_and_steps_are_exact_with_replicas_and_a_tied_weight() -> None:
    for differences, mine, theirs in run_strict(_compare, 4, _CASE, timeout=180.0):
        for d in differences:
            assert d.loss_error <= FLOAT32_LIMIT
            assert d.gradient_error <= FLOAT32_LIMIT
            assert d.norm_error <= FLOAT32_LIMIT
        assert mine == pytest.approx(theirs, abs=1e-4)


def _save_and_load(rank: int, folder: str) -> list[tuple[list[str], float]]:
    """Save from one kind of optimizer, load into the other, twice; then a step of each."""
    found = []
    case = replace(_CASE, dp=1)
    for index, now in enumerate([case, replace(case, offload=False, pp=1, sp=2), case]):
        engine = checkpoint_cases.build(now)
        if index == 0:
            checkpoint_cases.train(engine, now, 2)
        else:
            place, _ = engine.load_checkpoint(folder)
            wrong = checkpoint_cases.differences(engine, Path(place))
            assert engine.global_steps == 2
        engine.save_checkpoint(folder, tag=f"copy-{index}")
        if index:
            found.append((wrong, checkpoint_cases.train(engine, now, 2)[-1]))
        engine.close()
    return found


@pytest.mark.ranks
def test_checkpoints_of_offloaded_and_other_optimizers_are_the_same(tmp_path: Path) -> None:
    for found in run_strict(_save_and_load, 2, str(tmp_path), timeout=150.0):
        assert [wrong for wrong, _ in found] == [[], []]
        assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


def _own_optimizer(rank: int) -> tuple[str, bool]:
    checkpoint_cases.quiet()
    config = exactness.make_config(replace(_CASE, dp=1))
    del config["optimizer"]
    from ds_infinipipe.runtime.engine.initialize import initialize
    from ds_infinipipe.runtime.engine.module import InfiniPipeModule

    module = InfiniPipeModule(config)
    engine = initialize(
        model=module, config=config, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)
    )[0]
    checkpoint_cases.train(engine, replace(_CASE, dp=1), 1)
    engine.close()
    return type(engine.optimizer.optimizer).__name__, engine.optimizer.offload_optimizer


@pytest.mark.ranks
def test_a_runs_own_optimizer_may_be_offloaded() -> None:
    assert run_strict(_own_optimizer, 2, timeout=90.0) == [("AdamW", True)] * 2


def test_the_memory_model_leaves_only_parameters_on_the_device() -> None:
    model = BUILTIN_MODELS["llama-7b"]
    layout = make_layout(model, 4, 2)
    setup = setup_of(model, layout)
    whole = MemoryModel(setup).state_bytes
    rest = MemoryModel(setup.run_with(offloads_optimizer=True)).state_bytes
    bucket = 2 * reduce_bucket_elements(model)
    assert rest == pytest.approx([(b - bucket) * 2 / 18 + bucket for b in whole])
