"""The loop behind `infinipipe train`: corpus, model, engine, steps, one log line each."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from ds_infinipipe.config import InfiniPipeConfig
from ds_infinipipe.data.dataset import DocumentDataset
from ds_infinipipe.planner.forecast import forecast
from ds_infinipipe.planner.types import Timeline
from ds_infinipipe.runtime.agree import raise_together
from ds_infinipipe.runtime.engine import InfiniPipeEngine
from ds_infinipipe.runtime.initialize import initialize
from ds_infinipipe.runtime.module import InfiniPipeModule, init_distributed
from ds_infinipipe.viz.chrome_trace import write_chrome_trace

__all__ = ["train"]

logger = logging.getLogger("ds_infinipipe.train")


def train(config: dict[str, Any], steps: int | None = None) -> list[float]:
    """Train as the DeepSpeed JSON `config` says and return the losses.

    Runs on every rank a launcher started. Raises InfiniPipeError before the first step where
    configuration, corpus or layout cannot work.
    """
    init_distributed(InfiniPipeConfig.from_deepspeed(config).runtime.timeout_s)
    _configure_logging()
    model = InfiniPipeModule(config)
    dataset = _load_dataset(model)
    engine, _, _, _ = initialize(model=model, training_data=dataset, config=config)
    try:
        return _run(engine, steps or engine.settings.training.steps)
    finally:
        engine.close()


def _load_dataset(model: InfiniPipeModule) -> DocumentDataset:
    with raise_together("reading the corpus"):
        dataset = DocumentDataset.from_settings(model.settings.data, model.spec.vocab_size)
    if dist.get_rank() == 0:
        logger.info("corpus: %s", dataset.report)
    return dataset


def _run(engine: InfiniPipeEngine, steps: int) -> list[float]:
    losses = []
    log_every = engine.settings.training.log_every
    for _ in range(steps):
        losses.append(float(engine.train_batch()))
        report = engine.report
        assert report is not None
        if engine.global_rank == 0 and report.step % log_every == 0:
            logger.info("%s", report.line())
        _dump(engine)
    return losses


def _dump(engine: InfiniPipeEngine) -> None:
    debug, plan = engine.settings.debug, engine.plan
    assert plan is not None
    name = f"step-{engine.global_steps:06d}"
    if debug.dump_plans is not None and engine.global_rank == 0:
        Path(debug.dump_plans).mkdir(parents=True, exist_ok=True)
        (Path(debug.dump_plans) / f"{name}.json").write_text(plan.to_json(), encoding="utf-8")
    if debug.trace is not None:
        measured = _gather_timeline(engine)
        if engine.global_rank == 0:
            Path(debug.trace).mkdir(parents=True, exist_ok=True)
            timelines = {"predicted": forecast(plan), "measured": measured}
            write_chrome_trace(Path(debug.trace) / f"{name}.json", timelines, plan)


def _gather_timeline(engine: InfiniPipeEngine) -> Timeline:
    """What the first rank of every stage measured, a collective over all ranks."""
    everyone: list[Timeline | None] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(everyone, engine.timeline)
    stages = [t for t in everyone[:: engine.sp_size] if t is not None]
    makespan_s = max(t.makespan_s for t in stages)
    busy_s = tuple(t.busy_s[0] for t in stages)
    spans = tuple(span for t in stages for span in t.spans)
    return Timeline(spans, makespan_s, 1.0 - sum(busy_s) / (makespan_s * len(busy_s)), busy_s)


def _configure_logging() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    root = logging.getLogger("ds_infinipipe")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
        root.propagate = False
