"""Run one recorded step alone, for timing it or for finding out what went wrong."""

from __future__ import annotations

import logging
from typing import Any

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.setup import Execution, Setup
from ds_infinipipe.runtime.engine.initialize import initialize
from ds_infinipipe.runtime.engine.module import InfiniPipeModule
from ds_infinipipe.runtime.engine.record import load_step
from ds_infinipipe.runtime.engine.train import start_logging
from ds_infinipipe.runtime.ranks.agree import raise_together

__all__ = ["replay"]

logger = logging.getLogger("ds_infinipipe.replay")


def replay(config: dict[str, Any], path: str, times: int = 1) -> list[float]:
    """Execute the recorded plan `times` times on freshly built weights; returns the losses.

    Runs on every rank a launcher started, in the layout the plan was made for. Raises ConfigError
    where the configuration's model or layout is another one.
    """
    start_logging(config)
    model = InfiniPipeModule(config)
    with raise_together("replaying"):
        plan, batch = load_step(path)
        mine = model.layout
        if (plan.layout.pp, plan.layout.sp, plan.layout.stage_layers) != (
            mine.pp,
            mine.sp,
            mine.stage_layers,
        ):
            raise ConfigError(
                f"{path} was planned for pp {plan.layout.pp}, sp {plan.layout.sp} and layers "
                f"{plan.layout.stage_layers}, but this run has pp {mine.pp}, sp {mine.sp} and "
                f"{mine.stage_layers}: start it in the plan's layout"
            )
        own, theirs = model.setup, plan.setup
        if (theirs.model, _layers(theirs)) != (own.model, _layers(own)):
            raise ConfigError(
                f"{path} was planned for {theirs.model} under {theirs.execution}, but this "
                f"configuration's is {own.model} under {own.execution}: use the configuration of "
                "the recorded run"
            )
    engine = initialize(model=model, config=config)[0]
    losses = []
    try:
        for _ in range(times):
            losses.append(float(engine.train_plan(plan, batch)))
            assert engine.report is not None
            logger.info("%s", engine.report.line())
    finally:
        engine.close()
    return losses


def _layers(setup: Setup) -> Execution:
    """How layers run, whatever is sharded, gathered or blocked around them."""
    return setup.run_with(zero_stage=0, loss_block_tokens=1, keeps_gathered=False).execution
