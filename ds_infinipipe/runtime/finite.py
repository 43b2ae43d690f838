"""What happens when a loss or a gradient is not a finite number."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch
from deepspeed import comm as dist

from ds_infinipipe.errors import NonFiniteError
from ds_infinipipe.runtime.record import save_step

if TYPE_CHECKING:
    from ds_infinipipe.runtime.engine import InfiniPipeEngine
    from ds_infinipipe.runtime.step import StepState

__all__ = ["may_step"]

logger = logging.getLogger(__name__)


def may_step(engine: InfiniPipeEngine, step: StepState) -> bool:
    """True if the step's loss and gradients are finite on every rank; a collective over all.

    Otherwise the step is saved for replay by one rank of each replica, and then skipped (False) or
    NonFiniteError is raised, as `training.on_nonfinite` says.
    """
    loss_is_finite = math.isfinite(engine.executor.loss_sum)
    bad = not loss_is_finite or not engine.sharding.gradients_are_finite()
    votes = torch.tensor([float(bad), float(not loss_is_finite)], device=engine.device)
    dist.all_reduce(votes)
    if not votes[0].item():
        return True
    what = "loss is" if votes[1].item() else "gradients are"
    settings = engine.settings.training
    name = f"step-{engine.global_steps + 1:06d}-replica-{engine.grid.replica}"
    if engine.global_rank == engine.grid.plan_rank:
        save_step(settings.failure_dir, name, step.plan, step.batch)
    message = (
        f"step {engine.global_steps + 1}: the {what} not finite on {votes[0].item():.0f} of "
        f"{dist.get_world_size()} ranks; the step is saved as {settings.failure_dir}/{name}.json "
        "for 'infinipipe replay'"
    )
    if settings.on_nonfinite == "stop":
        raise NonFiniteError(
            f"{message}. Lower the learning rate or clip gradients, or set "
            "infinipipe.training.on_nonfinite to skip"
        )
    if engine.global_rank == 0:
        logger.warning("%s, and skipped", message)
    return False
