"""What happens when a loss or a gradient is not a finite number."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist

from ds_infinipipe.errors import NonFiniteError
from ds_infinipipe.runtime.faults import check_all_took_part
from ds_infinipipe.runtime.last_words import refer
from ds_infinipipe.runtime.loss_scale import is_exhausted
from ds_infinipipe.runtime.record import save_step

if TYPE_CHECKING:
    from ds_infinipipe.runtime.engine import InfiniPipeEngine
    from ds_infinipipe.runtime.step import StepState

__all__ = ["may_step"]

logger = logging.getLogger(__name__)


def may_step(engine: InfiniPipeEngine, step: StepState) -> bool:
    """True if the step's loss and gradients are finite on every rank; a collective over all.

    The same collective adds up `engine.gradient_norm`, of all gradients before clipping.

    An overflow of fp16 gradients beneath a finite loss lowers the loss scale and skips the step
    (False), which is how dynamic scaling finds its scale. Otherwise the step is saved for replay by
    one rank of each replica, and then skipped (False) or NonFiniteError is raised, as
    `training.on_nonfinite` says: a loss that is not finite, or gradients that overflow even at the
    smallest scale, no scale can cure.
    """
    loss_is_finite = math.isfinite(engine.executor.loss_sum)
    square = engine.sharding.squared_norm()
    bad = not (loss_is_finite and math.isfinite(square))
    mine = [float(bad), float(not loss_is_finite), 1.0, 0.0 if bad else square]
    votes = torch.tensor(mine, dtype=torch.float64, device=engine.device)
    dist.all_reduce(votes)
    *counts, square = votes.tolist()
    num_bad, num_bad_losses, num_ranks = (round(count) for count in counts)
    check_all_took_part(num_ranks, "step")
    step.is_committed = True
    if not num_bad:
        engine.gradient_norm = math.sqrt(square / engine.sharding.num_holders)
        return True
    scaler = engine.loss_scaler
    if scaler is not None and not num_bad_losses and not is_exhausted(scaler):
        _lower_scale(engine, scaler)
        return False
    what = "loss is" if num_bad_losses else "gradients are"
    _handle(engine, step, f"the {what} not finite on {num_bad} of {dist.get_world_size()} ranks")
    return False


def _lower_scale(engine: InfiniPipeEngine, scaler: Any) -> None:
    before = scaler.cur_scale
    scaler.update_scale(True)
    if engine.global_rank == 0:
        logger.warning(
            "step %d: fp16 gradients overflowed at loss scale %g, which is %g now; skipped",
            engine.global_steps + 1,
            before,
            scaler.cur_scale,
        )


def _handle(engine: InfiniPipeEngine, step: StepState, found: str) -> None:
    """Save the step and end the run, or log that it is skipped, as the settings say."""
    settings = engine.settings.training
    name = f"step-{engine.global_steps + 1:06d}-replica-{engine.grid.replica}"
    if engine.global_rank == engine.grid.plan_rank:
        save_step(settings.failure_dir, name, step.plan, step.batch)
    scale = "" if engine.loss_scaler is None else f" at loss scale {engine.loss_scaler.cur_scale:g}"
    message = (
        f"step {engine.global_steps + 1}: {found}{scale}; the step is saved as "
        f"{settings.failure_dir}/{name}.json for 'infinipipe replay'"
    )
    if settings.on_nonfinite == "stop":
        error = NonFiniteError(
            f"{message}. Lower the learning rate or clip gradients, or set "
            "infinipipe.training.on_nonfinite to skip"
        )
        raise refer(error, 0)
    if engine.global_rank == 0:
        logger.warning("%s, and skipped", message)
