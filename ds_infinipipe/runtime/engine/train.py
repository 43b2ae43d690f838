"""The loop behind `infinipipe train`: corpus, model, engine, steps, one log line each."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.data.dataset import DocumentDataset
from ds_infinipipe.planner.plan.stream import Timeline
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.runtime.checkpoint.routine import CheckpointRoutine
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.engine.initialize import initialize
from ds_infinipipe.runtime.engine.module import InfiniPipeModule, init_distributed
from ds_infinipipe.runtime.engine.record import save_step
from ds_infinipipe.runtime.ranks.agree import check_writable, raise_together
from ds_infinipipe.viz.chrome_trace import write_chrome_trace

__all__ = ["start_logging", "train"]

logger = logging.getLogger("ds_infinipipe.train")


def train(config: dict[str, Any], steps: int | None = None) -> list[float]:
    """Train up to `steps` as the DeepSpeed JSON `config` says and return this run's losses.

    Runs on every rank a launcher started. Raises InfiniPipeError before the first step where
    configuration, corpus or layout cannot work.
    """
    start_logging(config)
    logger.info("%d ranks joined; building the model", dist.get_world_size())
    model = InfiniPipeModule(config)
    layout, zero = model.layout, model.zero_stage
    logger.info("pp %d, sp %d, dp %d, ZeRO-%d", layout.pp, layout.sp, layout.dp, zero)
    dataset = _load_dataset(model)
    engine, _, _, _ = initialize(model=model, training_data=dataset, config=config)
    before = signal.signal(signal.SIGTERM, lambda *_: engine.request_stop())
    try:
        return _run(engine, steps or engine.settings.training.steps)
    finally:
        signal.signal(signal.SIGTERM, before)
        engine.close()


def _load_dataset(model: InfiniPipeModule) -> DocumentDataset:
    logger.info("reading the corpus %s", model.settings.data.path)
    with raise_together("reading the corpus"):
        dataset = DocumentDataset.from_settings(model.settings.data, model.spec.vocab_size)
    if dist.get_rank() == 0:
        logger.info("corpus: %s", dataset.report)
    return dataset


def _run(engine: InfiniPipeEngine, steps: int) -> list[float]:
    losses = []
    log_every = engine.settings.training.log_every
    checkpoints = CheckpointRoutine(engine.checkpointer, engine.settings.checkpoint)
    checkpoints.check_writable()
    for name in ("dump_plans", "trace"):
        if (folder := getattr(engine.settings.debug, name)) is not None:
            check_writable(folder, f"infinipipe.debug.{name}")
    checkpoints.resume(steps)
    while engine.global_steps < steps:
        losses.append(float(engine.train_batch()))
        report = engine.report
        assert report is not None
        if engine.rank.is_first and report.step % log_every == 0:
            logger.info("%s", report.line())
        _dump(engine)
        checkpoints.after_step()
        if engine.stop_requested:
            logger.info("asked to stop: ended after step %d", engine.global_steps)
            break
    checkpoints.at_end()
    return losses


def _dump(engine: InfiniPipeEngine) -> None:
    debug, plan = engine.settings.debug, engine.plan
    assert plan is not None
    name = f"step-{engine.global_steps:06d}"
    if debug.dump_plans is not None and engine.rank.is_planner:
        assert engine.batch is not None
        name_here = f"{name}-replica-{engine.rank.replica}"
        save_step(debug.dump_plans, name_here, plan, engine.batch)
    if debug.trace is not None:
        measured = _gather_timeline(engine)
        if engine.rank.is_first:
            Path(debug.trace).mkdir(parents=True, exist_ok=True)
            timelines = {"predicted": forecast(plan), "measured": measured}
            write_chrome_trace(Path(debug.trace) / f"{name}.json", timelines, plan)


def _gather_timeline(engine: InfiniPipeEngine) -> Timeline:
    """What the first rank of every stage measured, a collective over all ranks."""
    rank = engine.rank
    everyone: list[Timeline | None] = [None] * rank.world_size
    torch.distributed.all_gather_object(everyone, engine.timeline)
    one_replica = everyone[: rank.num_stages * rank.sp_size : rank.sp_size]
    stages = [t for t in one_replica if t is not None]
    makespan_s = max(t.makespan_s for t in stages)
    busy_s = tuple(t.busy_s[0] for t in stages)
    spans = tuple(span for t in stages for span in t.spans)
    return Timeline(spans, makespan_s, 1.0 - sum(busy_s) / (makespan_s * len(busy_s)), busy_s)


def start_logging(config: dict[str, Any]) -> None:
    """Join the process group and let rank 0 speak on stdout; other ranks only warn."""
    init_distributed(InfiniPipeConfig.from_deepspeed(config).runtime.timeout_s)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    root = logging.getLogger("ds_infinipipe")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
        root.propagate = False
