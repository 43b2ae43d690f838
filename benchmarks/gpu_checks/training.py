"""A model of 1-2 billion parameters on one device: sliced, whole, and in plain Hugging Face."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from ds_infinipipe.checks.random_plans import with_prediction
from ds_infinipipe.launcher import become_only_rank
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.order import backward_order
from ds_infinipipe.planner.plan.plan import PipelinePlan, Plan, Prediction, SolverStats
from ds_infinipipe.planner.predict.schedule import pipeline_schedule
from ds_infinipipe.planner.predict.time import step_flops
from ds_infinipipe.planner.verify.frame import verify_plan
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.engine.initialize import initialize
from ds_infinipipe.runtime.engine.module import InfiniPipeModule
from ds_infinipipe.runtime.stage.batch import StepBatch
from ds_infinipipe.runtime.stage.meter import MemoryMeter
from gpu_checks.measure import Budget, Row, Sizes, seconds

__all__ = ["check_training"]

_TIMED_STEPS = 2
_MOST_SLICES = 512


def check_training(sizes: Sizes, budget: Budget) -> Iterator[Row]:
    """Tokens a second, utilisation and memory of each way, and the longest context that fits."""
    engine = _engine(sizes)
    flops_rate: dict[tuple[str, int], float] = {}
    try:
        parameters = engine.module.spec.layer_params * engine.module.spec.num_layers
        parameters += 2 * engine.module.spec.embedding_params
        yield Row("training", "parameters", parameters / 1e9, "G")
        for tokens in sizes.train_tokens:
            for way, slice_tokens in (("sliced", sizes.slice_tokens), ("whole", tokens)):
                if budget.left_s < 30 and not sizes.is_dry:
                    yield Row("training", f"{way} {tokens}", None, "", note="no time left")
                    continue
                yield from _ours(engine, sizes, way, tokens, slice_tokens, flops_rate)
        yield from _ratios(flops_rate, sizes)
        if budget.left_s > 60 or sizes.is_dry:
            yield from _longest(engine, sizes)
    finally:
        engine.close()
    del engine
    _free()
    yield from _plain(sizes, budget, flops_rate)


def _engine(sizes: Sizes) -> InfiniPipeEngine:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": sizes.dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3},
        "infinipipe": {
            "model": {"config": sizes.model},
            "planning": {"asynchronous": False},
        },
    }
    become_only_rank()
    return initialize(model=InfiniPipeModule(config, dtype=sizes.dtype), config=config)[0]


def _batch(tokens: int, vocab_size: int) -> StepBatch:
    ids = np.random.default_rng(tokens).integers(0, vocab_size, size=tokens)
    return StepBatch.from_samples([ids], tokens, vocab_size)


def _ours(
    engine: InfiniPipeEngine,
    sizes: Sizes,
    way: str,
    tokens: int,
    slice_tokens: int,
    flops_rate: dict[tuple[str, int], float],
) -> Iterator[Row]:
    plan, name = _plan_that_fits(engine, sizes, tokens, slice_tokens), f"{way} {tokens}"
    if plan is None:
        yield Row("training", name, None, "", note="the memory model says that it does not fit")
        return
    batch = _batch(tokens, engine.module.spec.vocab_size)
    try:
        engine.train_plan(plan, batch)  # the first step makes Adam's moments
        with MemoryMeter(engine.device, engine.before_step_hooks) as meter:
            engine.train_plan(plan, batch)
        taken_s = seconds(lambda: engine.train_plan(plan, batch), sizes, _TIMED_STEPS)
    except torch.OutOfMemoryError as error:
        yield Row("training", name, None, "", "fits", False, str(error).split("\n")[0])
        return
    flops = step_flops(plan)
    flops_rate[way, tokens] = (flops.model + flops.recompute) / taken_s
    recomputed = plan.pipelines[0].recompute[0][0]
    note = f"{len(plan.chunks)} chunks, {recomputed} layers recomputed"
    yield Row("training", f"{name} tokens/s", tokens / taken_s, "", note=note)
    yield Row("training", f"{name} MFU", flops.model / taken_s / sizes.peak_flops, "")
    yield Row("training", f"{name} step", taken_s, "s")
    use, predicted = meter.use, plan.predicted.peak_bytes[0]
    difference = predicted / use.peak_bytes - 1
    # in a dry run the tensors of the process that no model knows weigh more than the model
    is_judged = not sizes.is_dry
    yield Row(
        "memory",
        f"{name} predicted / measured",
        difference,
        f"of {use.peak_bytes / 2**30:.2f} GiB",
        "within 0.05" if is_judged else "",
        abs(difference) <= 0.05 if is_judged else None,
    )


def _ratios(flops_rate: dict[tuple[str, int], float], sizes: Sizes) -> Iterator[Row]:
    """Sliced beside whole, recomputed work counted in both; slices of a whole mean nothing."""
    for tokens in sizes.train_tokens:
        sliced, whole = (flops_rate.get((way, tokens)) for way in ("sliced", "whole"))
        if sliced is None or whole is None or tokens <= sizes.slice_tokens:
            continue
        ratio = sliced / whole
        is_judged = not sizes.is_dry
        yield Row(
            "training",
            f"sliced / whole FLOP rate {tokens}",
            ratio,
            "",
            ">= 0.9" if is_judged else "",
            ratio >= 0.9 if is_judged else None,
        )


def _longest(engine: InfiniPipeEngine, sizes: Sizes) -> Iterator[Row]:
    """One step at the longest context asked for, in slices; and the longest there could be."""
    for way in ("sliced", "whole"):
        longest = _longest_by_model(engine, sizes, is_whole=way == "whole")
        yield Row("training", f"longest {way} by the memory model", longest / 1024, "Ki tokens")
    tokens = sizes.longest_tokens
    plan = _plan_that_fits(engine, sizes, tokens, sizes.slice_tokens)
    if plan is None:
        yield Row("training", f"longest {tokens}", 0.0, "", "fits", False, "by the memory model")
        return
    try:
        engine.train_plan(plan, _batch(tokens, engine.module.spec.vocab_size))
    except torch.OutOfMemoryError as error:
        yield Row("training", f"longest {tokens}", 0.0, "", "fits", False, str(error)[:100])
        return
    peak = plan.predicted.peak_bytes[0] / 2**30
    yield Row("training", f"longest {tokens}", peak, "GiB predicted", "fits", True)


def _longest_by_model(engine: InfiniPipeEngine, sizes: Sizes, *, is_whole: bool) -> int:
    """Most tokens, in whole slices, whose plan with all layers recomputed fits the device."""
    layers, limit = engine.module.spec.num_layers, _memory_limit(sizes)

    def fits(tokens: int) -> bool:
        plan = _fixed_plan(engine, tokens, tokens if is_whole else sizes.slice_tokens, layers)
        return plan.predicted.peak_bytes[0] <= limit

    fitting, too_many = 0, 1
    while too_many <= _MOST_SLICES and fits(too_many * sizes.slice_tokens):
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle * sizes.slice_tokens):
            fitting = middle
        else:
            too_many = middle
    return fitting * sizes.slice_tokens


def _memory_limit(sizes: Sizes) -> int:
    """Nine tenths of the device; in a dry run a few megabytes, so that not everything fits."""
    if sizes.device.type != "cuda":
        return 2**24
    return int(0.9 * torch.cuda.get_device_properties(sizes.device).total_memory)


def _plan_that_fits(
    engine: InfiniPipeEngine, sizes: Sizes, tokens: int, slice_tokens: int
) -> Plan | None:
    """Equal slices with as few recomputed layers as nine tenths of the device hold."""
    limit, layers = _memory_limit(sizes), engine.module.spec.num_layers
    for recompute in range(layers + 1):
        plan = _fixed_plan(engine, tokens, slice_tokens, recompute)
        if plan.predicted.peak_bytes[0] <= limit:
            verify_plan(plan)
            return plan
    return None


def _fixed_plan(engine: InfiniPipeEngine, tokens: int, slice_tokens: int, recompute: int) -> Plan:
    bounds = [*range(0, tokens, slice_tokens), tokens]
    slices = [Slice(0, a, b - a, b == tokens) for a, b in itertools.pairwise(bounds)]
    chunks = tuple(Chunk((piece,)) for piece in slices)
    forward, layout = tuple(range(len(chunks))), engine.module.layout
    pipeline = PipelinePlan(
        forward, backward_order(chunks, forward), ((recompute,) * len(chunks),), len(chunks)
    )
    operations = pipeline_schedule((pipeline,), layout.pp).as_operations()
    plan = Plan(
        setup=replace(engine.module.setup, limit_bytes=2**60),
        lengths=(tokens,),
        chunks=chunks,
        pipelines=(pipeline,),
        streams=lower_plan((pipeline,), chunks, layout, operations),
        predicted=Prediction(0.0, 0.0, (0,)),
        solver=SolverStats("fixed", len(chunks), "feasible", 0.0, 0.0),
    )
    return with_prediction(plan)


def _plain(sizes: Sizes, budget: Budget, flops_rate: dict[tuple[str, int], float]) -> Iterator[Row]:
    """The same model by transformers, unsliced, with its own activation checkpointing."""
    fields: dict[str, Any] = dict(sizes.model)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=sizes.dtype
    ).to(sizes.device)
    model.gradient_checkpointing_enable()
    model.train()
    is_cuda = sizes.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=is_cuda or None)
    for tokens in sizes.train_tokens:
        if budget.left_s < 20 and not sizes.is_dry:
            yield Row("plain", f"{tokens}", None, "", note="no time left")
            continue
        yield _plain_row(_PlainStep(model, optimizer, sizes, tokens), sizes, _TIMED_STEPS)
    if budget.left_s > 60 or sizes.is_dry:
        yield _plain_row(_PlainStep(model, optimizer, sizes, sizes.longest_tokens), sizes, 0)


@dataclass
class _PlainStep:
    """One optimizer step on one document, all its logits in memory."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    sizes: Sizes
    tokens: int

    def run(self) -> None:
        batch = _batch(self.tokens, int(self.sizes.model["vocab_size"]))
        ids = torch.from_numpy(batch.ids[0])[None].to(self.sizes.device)
        labels = torch.from_numpy(batch.labels[0]).to(self.sizes.device)
        logits = self.model(ids, use_cache=False).logits[0]
        F.cross_entropy(logits.float(), labels, ignore_index=-100).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _plain_row(step: _PlainStep, sizes: Sizes, timed_steps: int) -> Row:
    """Tokens a second and peak memory; without timed steps, whether one step fits."""
    is_cuda, name = sizes.device.type == "cuda", f"{step.tokens} tokens/s"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        if timed_steps:
            rate: float | None = step.tokens / seconds(step.run, sizes, timed_steps)
        else:
            rate, name = None, f"longest {step.tokens}"
            step.run()
    except torch.OutOfMemoryError:
        step.optimizer.zero_grad()
        _free()
        return Row("plain", name, None, "", note="out of memory")
    note = "fits"
    if is_cuda:
        peak = torch.cuda.max_memory_allocated() / 2**30
        note = f"peak {peak:.1f} GiB; bf16 masters, no float32 states"
    return Row("plain", name, rate, "", note=note)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
