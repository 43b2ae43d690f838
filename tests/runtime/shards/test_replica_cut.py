"""Optimizer states cut over the replicas: the same training, in less memory."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from ranks import run_strict

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import FLOAT32_LIMIT, Case, StepDifference
from ds_infinipipe.checks.memory_truth import MemoryCase, MemoryDifference, compare_memory
from ds_infinipipe.config.section import derive_deepspeed_config
from ds_infinipipe.errors import ConfigError, InfiniPipeError
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine

_CASE = Case("llama", 1, 2, 2, tied=True, shards_optimizer=True, num_layers=2)


def _quiet() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)


def _compare(
    rank: int, cases: list[Case]
) -> list[tuple[list[StepDifference], list[float], list[float]]]:
    _quiet()
    return [
        (exactness.compare_steps(case), *exactness.reference_curve(replace(case, seed=1, steps=4)))
        for case in cases
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cases",
    [
        [
            _CASE,
            Case("qwen2", 2, 1, 2, tied=True, num_layers=2, num_sequences=3, seed=4),
            Case("llama", 2, 1, 2, tied=True, offload=True, num_layers=2),
        ],
        [Case("qwen3", 1, 1, 3, num_layers=2, num_sequences=2)],
    ],
    ids=["two replicas", "three replicas, one without a sequence"],
)
def test_gradients_norms_and_steps_are_exact(cases: list[Case]) -> None:
    cases = [replace(case, shards_optimizer=True) for case in cases]
    world_size = cases[0].pp * cases[0].sp * cases[0].dp
    for found in run_strict(_compare, world_size, cases, timeout=240.0):
        for differences, mine, theirs in found:
            for d in differences:
                assert d.loss_error <= FLOAT32_LIMIT, d
                assert d.gradient_error <= FLOAT32_LIMIT, d
                assert d.norm_error <= FLOAT32_LIMIT, d
            assert mine == pytest.approx(theirs, abs=1e-4)


def _train(engine: InfiniPipeEngine, case: Case) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step; every replica has a plan of its own."""
    found = []
    for step in range(case.steps):
        batch = exactness.random_batch(case, step)
        share = engine.replica_share(batch)
        plan = exactness.draw_plan(engine, case, share, step)
        loss = float(engine.train_plan(plan, share, whole=batch))
        assert engine.report is not None
        found.append((loss, engine.report.grad_norm))
    return found


def _cut_and_whole(rank: int, case: Case) -> tuple[list[list[tuple[float, float]]], int, int]:
    """Both trainings, and elements of moments on this rank in each; their states are compared."""
    _quiet()
    steps, states, kept = [], [], []
    for shards in (True, False):
        engine = exactness.build_engine(replace(case, shards_optimizer=shards))
        steps.append(_train(engine, case))
        kept.append(sum(s["exp_avg"].numel() for s in engine.optimizer.optimizer.state.values()))
        states.append(
            [
                tensor.clone()
                for p in engine.module.parameters()
                for tensor in (
                    safe_get_full_fp32_param(p),
                    safe_get_full_optimizer_state(p, "exp_avg_sq"),
                )
            ]
        )
        if shards:
            some = next(iter(engine.module.parameters()))
            with pytest.raises(InfiniPipeError, match="shard_optimizer_over_dp to false"):
                safe_set_full_fp32_param(some, torch.zeros(some.ds_shape))
        engine.close()
    is_half = case.bf16 or case.fp16
    for mine, whole in zip(*states, strict=True):
        if is_half:  # sums of halves round by their order, which is the processor's
            assert (mine - whole).norm() <= 1e-2 * whole.norm()
        else:
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-6)
    return steps, *kept


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "rel"),
    [
        (replace(_CASE, sp=1, clip=0.05, steps=5), 1e-6),
        (replace(_CASE, pp=2, sp=1, bf16=True, clip=0.05, steps=5), 1e-3),
        (replace(_CASE, sp=1, fp16=True, clip=0.05, steps=5), 1e-3),
    ],
    ids=["float32", "bf16", "fp16"],
)
def test_clipped_steps_are_those_of_states_that_each_replica_keeps(case: Case, rel: float) -> None:
    world_size = case.pp * case.sp * case.dp
    for (cut, whole), kept, all_of_it in run_strict(_cut_and_whole, world_size, case, timeout=90.0):
        assert all(norm > case.clip for _, norm in whole)
        assert cut == [pytest.approx(step, rel=rel) for step in whole]
        assert all_of_it <= 2 * kept <= 1.1 * all_of_it


def _memory(rank: int, case: MemoryCase) -> list[MemoryDifference]:
    _quiet()
    return compare_memory(case)


@pytest.mark.ranks
def test_the_memory_model_knows_what_a_replica_keeps() -> None:
    case = MemoryCase(
        "llama", 1, 1, 2, is_bf16=True, shards_optimizer=True, max_tokens=900, random_plans=2
    )
    for found in run_strict(_memory, 2, case, timeout=120.0):
        assert all(abs(d.states_error) <= 0.05 for d in found)
        assert all(abs(d.step_error) <= 0.05 for d in found)


def test_there_is_nothing_to_cut_without_zero_3() -> None:
    config = exactness.make_config(replace(_CASE, zero_stage=0))
    with pytest.raises(ConfigError, match=r"zero_optimization.stage is 0: set the stage to 3"):
        derive_deepspeed_config(config, 4)
