"""The loop behind `infinipipe train`: corpus, model, engine, steps, one log line each."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from ds_infinipipe.data.dataset import DocumentDataset
from ds_infinipipe.planner.types import Timeline
from ds_infinipipe.runtime.agree import raise_together
from ds_infinipipe.runtime.engine import InfiniPipeEngine
from ds_infinipipe.runtime.initialize import initialize
from ds_infinipipe.runtime.module import InfiniPipeModule
from ds_infinipipe.viz.chrome_trace import timeline_to_chrome

__all__ = ["train"]

logger = logging.getLogger("ds_infinipipe.train")


def train(config: dict[str, Any], steps: int | None = None) -> list[float]:
    """Train as the DeepSpeed JSON `config` says and return the losses.

    Runs on every rank a launcher started. Raises InfiniPipeError before the first step where
    configuration, corpus or layout cannot work.
    """
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
        _write(Path(debug.dump_plans) / f"{name}.json", plan.to_json())
    if debug.trace is not None:
        text = timeline_to_chrome(engine.timeline or Timeline((), 0.0, 0.0, ()))
        _write(Path(debug.trace) / f"{name}-rank-{engine.global_rank}.json", text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _configure_logging() -> None:
    torch.set_num_threads(max(1, torch.get_num_threads()))
    root = logging.getLogger("ds_infinipipe")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
