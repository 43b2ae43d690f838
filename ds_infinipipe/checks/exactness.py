"""Exactness check: random plans on a tiny model against a plain single-process reference.

The first rank holds the whole Hugging Face model beside its stage and runs the batch sequence by
sequence through it; every rank compares the loss, every gradient of its stage, and the norm. `main`
is `infinipipe verify`: the check on local ranks, as a table.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from transformers import AutoConfig, AutoModelForCausalLM

from ds_infinipipe.checks.random_plans import random_plan
from ds_infinipipe.model.hf import hf_class
from ds_infinipipe.model.weights import init_parameter
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.engine.initialize import initialize
from ds_infinipipe.runtime.engine.module import InfiniPipeModule
from ds_infinipipe.runtime.ranks.local import run_local_ranks
from ds_infinipipe.runtime.stage.batch import IGNORE_INDEX, StepBatch

__all__ = [
    "FLOAT32_LIMIT",
    "FLOAT64_LIMIT",
    "Case",
    "StepDifference",
    "compare_steps",
    "main",
    "make_config",
    "reference_curve",
]

FLOAT64_LIMIT = 1e-10
FLOAT32_LIMIT = 1e-5


@dataclass(frozen=True)
class Case:
    """One comparison: model family, layout, precision and the random numbers behind it."""

    model_type: str = "llama"
    pp: int = 2
    sp: int = 2
    dp: int = 1
    zero_stage: int = 3
    float64: bool = False
    bf16: bool = False
    fp16: bool = False
    offload: bool = False
    shards_optimizer: bool = False
    tied: bool = False
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 97
    max_tokens: int = 60
    num_sequences: int = 5
    steps: int = 2
    seed: int = 0
    alignment: int = 1
    weighted: bool = False
    loss_block_tokens: int = 7
    learning_rate: float = 1e-3
    clip: float = 0.3
    sliding_window: int | None = None
    fp8: str = "off"
    compiled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        if self.bf16 or self.fp16:
            return torch.bfloat16 if self.bf16 else torch.float16
        return torch.float64 if self.float64 else torch.float32


@dataclass(frozen=True)
class StepDifference:
    """Differences of one step: absolute for the loss, relative to the largest entry for gradients
    (the worst parameter's), relative for the norm."""

    step: int
    loss: float
    loss_error: float
    gradient_error: float
    worst_parameter: str
    norm: float
    norm_error: float
    chunks: int
    pipelines: int
    recomputed_layers: int
    split_backwards: int


def make_config(case: Case) -> dict[str, Any]:
    """The DeepSpeed JSON of a case."""
    hf_config = {
        "model_type": case.model_type,
        "hidden_size": 8 * case.num_heads,
        "intermediate_size": 48,
        "num_hidden_layers": case.num_layers,
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_kv_heads,
        "head_dim": 8,
        "vocab_size": case.vocab_size,
        "max_position_embeddings": 4 * case.max_tokens,
        "tie_word_embeddings": case.tied,
        "initializer_range": 0.1,
    }
    if case.model_type == "mistral":
        hf_config["sliding_window"] = case.sliding_window
    return {
        "train_batch_size": case.num_sequences,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": case.learning_rate, "weight_decay": 0.01},
        },
        "gradient_clipping": case.clip,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": case.bf16},
        "fp16": {"enabled": case.fp16},
        "zero_optimization": {
            "stage": case.zero_stage,
            "stage3_param_persistence_threshold": 40,
            "reduce_bucket_size": 6000,
            "offload_optimizer": {"device": "cpu" if case.offload else "none"},
        },
        "infinipipe": {
            "model": {
                "config": hf_config,
                "seed": case.seed,
                "fp8": case.fp8,
                "compile": case.compiled,
            },
            "parallel": {
                "pp": case.pp,
                "sp": case.sp,
                "dp": case.dp,
                "shard_optimizer_over_dp": case.shards_optimizer,
            },
            "planner": {
                "alignment": case.alignment,
                "loss_block_tokens": case.loss_block_tokens,
            },
            "planning": {"asynchronous": False},
            "runtime": {"timeout_s": 120.0},
        },
    }


def compare_steps(case: Case) -> list[StepDifference]:
    """Run the case on this rank of an initialised process group; a plan per step, all different.

    Before each step the reference takes over the engine's weights, so that each step is compared at
    equal weights.
    """
    engine = build_engine(case)
    with exact_norms(engine, case):
        reference = Reference(engine, case) if dist.get_rank() == 0 else None
        try:
            return [_compare_step(engine, reference, case, step) for step in range(case.steps)]
        finally:
            engine.close()


def reference_curve(case: Case) -> tuple[list[float], list[float]]:
    """Losses of the engine and of an independent reference trained beside it on the first rank."""
    engine = build_engine(case)
    with exact_norms(engine, case):
        weights = gather_weights(engine)
        reference = Reference(engine, case) if dist.get_rank() == 0 else None
        if reference is not None:
            reference.set_weights(weights)
        mine, theirs = [], []
        try:
            for step in range(case.steps):
                batch = random_batch(case, step)
                if reference is not None:
                    theirs.append(reference.run(batch)[0])
                    reference.step()
                share = engine.replica_share(batch)
                plan = draw_plan(engine, case, share, step)
                mine.append(float(engine.train_plan(plan, share, whole=batch)))
        finally:
            engine.close()
        found = [theirs]
        torch.distributed.broadcast_object_list(found)
        return mine, found[0]


def build_engine(case: Case) -> InfiniPipeEngine:
    """Model and engine of a case."""
    return engine_from_config(make_config(case), case.dtype)


def engine_from_config(config: dict[str, Any], dtype: torch.dtype) -> InfiniPipeEngine:
    """Model and engine of a configuration."""
    module = InfiniPipeModule(config, dtype=dtype)
    return initialize(model=module, config=config)[0]


def random_batch(case: Case, step: int) -> StepBatch:
    """Sequences of odd lengths, the same for every layout; some labels are masked."""
    rng = np.random.default_rng([case.seed, step])
    samples = []
    for _ in range(int(rng.integers(1 + (case.dp == 1), case.num_sequences + 1))):
        ids = rng.integers(0, case.vocab_size, size=int(rng.integers(2, case.max_tokens + 1)))
        labels = np.where(rng.random(len(ids)) < 0.1, IGNORE_INDEX, ids)
        labels[-1] = ids[-1]  # at least one label
        weights = rng.random(len(ids)) + 0.1 if case.weighted else None
        samples.append({"input_ids": ids, "labels": labels, "loss_weights": weights})
    return StepBatch.from_samples(samples, 4 * case.max_tokens, case.vocab_size)


def draw_plan(engine: InfiniPipeEngine, case: Case, batch: StepBatch, step: int) -> Plan:
    """A random plan for a replica's batch; every rank of the replica draws the same one."""
    if not batch.ids:
        return engine.planning_task.idle()
    return random_plan(
        batch.lengths,
        np.random.default_rng([case.seed, step, 1, engine.grid.replica]),
        engine.module.setup,
    )


class Reference:
    """The Hugging Face model in one process, one sequence at a time, with torch's AdamW."""

    def __init__(self, engine: InfiniPipeEngine, case: Case) -> None:
        module = engine.module
        fields = module.settings.model.load_hf_config()
        hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        # a reference in half precision would have rounding of its own; its weights are halves
        dtype = torch.promote_types(case.dtype, torch.float32)
        self.model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation="sdpa"
        )
        self._parameters = dict(self.model.named_parameters())
        for name, parameter in self._parameters.items():
            init_parameter(name, parameter.data, seed=case.seed, std=hf_config.initializer_range)
        self._clip = case.clip
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=case.learning_rate, weight_decay=0.01
        )

    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over weights by their Hugging Face names."""
        with torch.no_grad():
            for name, tensor in weights.items():
                self._parameters[name].copy_(tensor)

    def copy_weights(self, engine: InfiniPipeEngine) -> None:
        """Take over the engine's weights, a collective: every rank has a reference of its own."""
        self.set_weights(gather_weights(engine))

    def gradients(self) -> dict[str, torch.Tensor]:
        """All gradients of the last `run` by their Hugging Face names."""
        return {n: p.grad for n, p in self._parameters.items() if p.grad is not None}

    def run(self, batch: StepBatch) -> tuple[float, float]:
        """Loss and gradient norm of a batch; gradients stay in the model."""
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        weights = batch.weights or tuple(np.ones(len(ids)) for ids in batch.ids)
        for ids, labels, factors in zip(batch.ids, batch.labels, weights, strict=True):
            logits = self.model(torch.from_numpy(ids)[None]).logits[0]
            losses = F.cross_entropy(
                logits, torch.from_numpy(labels), ignore_index=IGNORE_INDEX, reduction="none"
            )
            loss = (losses * torch.from_numpy(factors).to(losses.dtype)).sum() / batch.label_weight
            loss.backward()
            total += float(loss.detach())
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return total, float(torch.nn.utils.get_total_norm(gradients))

    def step(self) -> None:
        """Clip and step."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()


def full_weight(engine: InfiniPipeEngine, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A whole parameter, a collective over the stage under ZeRO-3."""
    if engine.module.zero_stage == 3:
        return safe_get_full_fp32_param(parameter).detach().clone()
    return parameter.detach().clone()


def gather_weights(engine: InfiniPipeEngine) -> dict[str, torch.Tensor]:
    """The weights of all stages by their Hugging Face names, a collective over all ranks."""
    mine = {name: full_weight(engine, p) for name, p in engine.module.hf_parameters()}
    everyone: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return {name: tensor for weights in everyone for name, tensor in weights.items()}


def _compare_step(
    engine: InfiniPipeEngine, reference: Reference | None, case: Case, step: int
) -> StepDifference:
    """`reference` is the first rank's; the others get what it finds."""
    batch = random_batch(case, step)
    share = engine.replica_share(batch)
    plan = draw_plan(engine, case, share, step)
    weights = gather_weights(engine) if step else {}
    found: list[Any] = [None]
    if reference is not None:
        reference.set_weights(weights)
        found = [(*reference.run(batch), reference.gradients())]
    torch.distributed.broadcast_object_list(found)
    wanted_loss, wanted_norm, gradients = found[0]
    errors: dict[str, float] = {}
    engine.before_step_hooks[:] = [lambda e: errors.update(_gradient_errors(e, gradients))]
    loss = float(engine.train_plan(plan, share, whole=batch))
    report = engine.report
    assert report is not None
    worst = max(errors, key=lambda name: errors[name])
    return StepDifference(
        step=step,
        loss=loss,
        loss_error=abs(loss - wanted_loss),
        gradient_error=errors[worst],
        worst_parameter=worst,
        norm=report.grad_norm,
        norm_error=abs(report.grad_norm - wanted_norm) / wanted_norm,
        chunks=len(plan.chunks),
        pipelines=len(plan.pipelines),
        recomputed_layers=report.recomputed_layers,
        split_backwards=sum(i.op is Op.BACKWARD_WEIGHT for stream in plan.streams for i in stream),
    )


def _gradient_errors(
    engine: InfiniPipeEngine, gradients: dict[str, torch.Tensor]
) -> dict[str, float]:
    errors = {}
    for name, parameter in engine.module.hf_parameters():
        wanted = gradients[name]
        found = engine.sharding.full_gradient(parameter)
        scale = max(float(wanted.abs().max()), 1e-12)
        errors[name] = float((found - wanted).abs().max()) / scale
    return errors


@contextlib.contextmanager
def exact_norms(engine: InfiniPipeEngine, case: Case) -> Iterator[None]:
    """In float64 keep the model's norms in float64, for engine and reference alike.

    Hugging Face norms compute in float32, whose rounding would hide errors above 1e-10.
    """
    norm = hf_class(engine.module.hf_config, "RMSNorm")
    original = norm.forward
    if case.float64:
        norm.forward = _float64_norm
    try:
        yield
    finally:
        norm.forward = original


def _float64_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    scaled: torch.Tensor = norm.weight * (hidden * torch.rsqrt(variance + norm.variance_epsilon))
    return scaled


def main(args: argparse.Namespace) -> int:
    """`infinipipe verify`: start local ranks, compare, print a table; 1 if anything is off.

    `args` has `pp`, `sp`, `steps` and `seed`.
    """
    cases = [
        Case(
            model_type=kind,
            pp=args.pp,
            sp=args.sp,
            zero_stage=zero_stage,
            float64=zero_stage == 0,
            tied=kind == "qwen2",
            num_layers=max(4, args.pp),
            num_heads=math.lcm(4, args.sp),
            num_kv_heads=math.lcm(2, args.sp),
            steps=args.steps,
            seed=args.seed,
        )
        for kind in ("llama", "qwen2", "qwen3")
        for zero_stage in (0, 3)
    ]
    by_rank = run_local_ranks(_compare_cases, args.pp * args.sp, cases)
    rows = [[d for rank in by_rank for d in rank[index]] for index in range(len(cases))]
    print(_table(cases, rows))
    failed = [c for c, r in zip(cases, rows, strict=True) if not _is_exact(c, r)]
    print(f"{len(cases) - len(failed)} of {len(cases)} comparisons hold")
    return 1 if failed else 0


def _compare_cases(cases: Sequence[Case]) -> list[list[StepDifference]]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    return [compare_steps(case) for case in cases]


def _is_exact(case: Case, differences: Sequence[StepDifference]) -> bool:
    limit = FLOAT64_LIMIT if case.float64 else FLOAT32_LIMIT
    return all(max(d.loss_error, d.gradient_error, d.norm_error) <= limit for d in differences)


def _table(cases: Sequence[Case], rows: Sequence[Sequence[StepDifference]]) -> str:
    lines = [
        "model       layout  precision       steps  loss diff  gradient diff  norm diff  chunks"
    ]
    for case, differences in zip(cases, rows, strict=True):
        kind = f"{case.model_type}{' tied' if case.tied else ''}"
        precision = "float64, ZeRO-0" if case.float64 else "float32, ZeRO-3"
        loss, gradient, norm = (
            max(getattr(d, name) for d in differences)
            for name in ("loss_error", "gradient_error", "norm_error")
        )
        chunks = sum(d.chunks for d in differences[: case.steps])
        lines.append(
            f"{kind:11s} {case.pp}x{case.sp:<5d} {precision}  {case.steps:5d}  {loss:9.1e}  "
            f"{gradient:13.1e}  {norm:9.1e}  {chunks:6d}"
        )
    return "\n".join(lines)
