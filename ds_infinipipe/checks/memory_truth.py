"""Predicted against measured peak bytes: random and planned steps of small models under the meter.

A model's sizes are such that activations, not parameters, make the peak. Two differences are kept
apart: of the model states between steps, and of everything a step adds to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ds_infinipipe.checks.exactness import engine_from_config
from ds_infinipipe.checks.random_plans import random_plan
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.state_bytes import state_bytes
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.stage.batch import StepBatch
from ds_infinipipe.runtime.stage.meter import MemoryMeter, live_tensor_bytes

__all__ = ["MemoryCase", "MemoryDifference", "compare_memory"]

_PERSISTENT_PARAMETERS = 300  # norm weights stay whole, as in models of real size


@dataclass(frozen=True)
class MemoryCase:
    """Model family, layout, precision, and the plans to run: random ones, then planned ones."""

    model_type: str = "llama"
    pp: int = 2
    sp: int = 2
    dp: int = 1
    zero_stage: int = 3
    shards_optimizer: bool = False
    is_bf16: bool = False
    fp8: str = "off"
    num_kv_heads: int = 2
    num_layers: int = 4
    random_plans: int = 3
    planned: int = 1
    hidden_size: int = 64
    ffn_size: int = 160
    num_heads: int = 4
    vocab_size: int = 128
    max_tokens: int = 1500
    loss_block_tokens: int = 128
    sliding_window: int | None = None
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_bf16 else torch.float32

    def config(self) -> dict[str, Any]:
        """The DeepSpeed JSON of the case."""
        return {
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "steps_per_print": 1_000_000,
            "bf16": {"enabled": self.is_bf16},
            "zero_optimization": {
                "stage": self.zero_stage,
                "stage3_param_persistence_threshold": _PERSISTENT_PARAMETERS,
            },
            "infinipipe": {
                "model": {"config": self._hf_config(), "seed": self.seed, "fp8": self.fp8},
                "parallel": {
                    "pp": self.pp,
                    "sp": self.sp,
                    "dp": self.dp,
                    "shard_optimizer_over_dp": self.shards_optimizer,
                },
                "planner": {"loss_block_tokens": self.loss_block_tokens},
                "planning": {"asynchronous": False},
            },
        }

    def _hf_config(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 4 * self.max_tokens,
            "sliding_window": self.sliding_window,
        }


@dataclass(frozen=True)
class MemoryDifference:
    """Bytes of one step on one stage; `states` between steps, `step` on top of them."""

    stage: int
    is_planned: bool
    num_tokens: int
    recomputed_share: float
    measured_states: int
    predicted_states: int
    measured_step: int
    predicted_step: int
    by_kind: dict[str, int]

    @property
    def step_error(self) -> float:
        """Relative to what was measured; positive where the model counts too much."""
        return self.predicted_step / self.measured_step - 1.0

    @property
    def states_error(self) -> float:
        """Relative to what was measured."""
        return self.predicted_states / self.measured_states - 1.0


def compare_memory(case: MemoryCase) -> list[MemoryDifference]:
    """Run the case's steps on this rank of an initialised process group."""
    foreign_bytes = live_tensor_bytes()
    engine = engine_from_config(case.config(), case.dtype)
    try:
        steps = case.random_plans + case.planned
        # the first step makes Adam's moments
        _compare_step(engine, case, steps, foreign_bytes)
        return [_compare_step(engine, case, step, foreign_bytes) for step in range(steps)]
    finally:
        engine.close()


def _compare_step(
    engine: InfiniPipeEngine, case: MemoryCase, step: int, foreign_bytes: int
) -> MemoryDifference:
    rng = np.random.default_rng([case.seed, step])
    batch = _random_batch(case, rng)
    is_planned = case.random_plans <= step < case.random_plans + case.planned
    plan = _planned(engine, batch) if is_planned else _random(engine, batch, rng)
    if case.zero_stage == 0:
        _make_gradients(engine)
    with MemoryMeter(engine.device, engine.before_step_hooks) as meter:
        engine.train_plan(plan, batch)
    use, stage = meter.use, engine.stage_id
    states = state_bytes(plan.setup, stage)
    counts = [count for p in plan.pipelines for count in p.recompute[stage]]
    return MemoryDifference(
        stage=stage,
        is_planned=is_planned,
        num_tokens=plan.num_tokens,
        recomputed_share=float(np.mean(counts)) / plan.layout.stage_layers[stage],
        measured_states=use.start_bytes - foreign_bytes,
        predicted_states=states,
        measured_step=use.dynamic_bytes,
        predicted_step=plan.predicted.peak_bytes[stage] - states,
        by_kind={kind.value: count for kind, count in use.by_kind.items() if count},
    )


def _make_gradients(engine: InfiniPipeEngine) -> None:
    """Gradients from the start of the step, as the model counts them for ZeRO-0.

    Left alone they come with the first backward, so a peak before it would need less.
    """
    for parameter in engine.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.sharding.begin_step = lambda: None  # type: ignore[method-assign]


def _random_batch(case: MemoryCase, rng: np.random.Generator) -> StepBatch:
    lengths = rng.integers(case.max_tokens // 8, case.max_tokens + 1, size=int(rng.integers(2, 5)))
    samples = [{"input_ids": rng.integers(0, case.vocab_size, size=int(n))} for n in lengths]
    return StepBatch.from_samples(samples, 4 * case.max_tokens, case.vocab_size)


def _random(engine: InfiniPipeEngine, batch: StepBatch, rng: np.random.Generator) -> Plan:
    return random_plan(
        batch.lengths,
        rng,
        engine.module.setup,
        may_split=engine.module.planner_settings.split_backward != "never",
    )


def _planned(engine: InfiniPipeEngine, batch: StepBatch) -> Plan:
    """The planner's plan, under a limit of three quarters of what it takes without one."""

    module = engine.module

    def plan(limit_bytes: int) -> Plan:
        setup = replace(module.setup, limit_bytes=limit_bytes)
        return plan_batch(batch.lengths, setup, module.planner_settings)

    return plan(int(0.75 * max(plan(2**40).predicted.peak_bytes)))
