"""What happens when a loss or a gradient is not a finite number."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from deepspeed import comm as dist

from ds_infinipipe.config.section import TrainingSettings
from ds_infinipipe.errors import NonFiniteError
from ds_infinipipe.runtime.engine.record import save_step
from ds_infinipipe.runtime.ranks.faults import check_all_took_part
from ds_infinipipe.runtime.ranks.last_words import refer
from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.shards.loss_scale import is_exhausted
from ds_infinipipe.runtime.shards.sharding import Sharding
from ds_infinipipe.runtime.stage.executor import StageExecutor
from ds_infinipipe.runtime.stage.step import StepRun

__all__ = ["FiniteCheck"]

logger = logging.getLogger(__name__)


class FiniteCheck:
    """Looks at every step's loss and gradients before the optimizer steps on them."""

    def __init__(
        self,
        rank: Rank,
        executor: StageExecutor,
        sharding: Sharding,
        loss_scaler: Any,
        settings: TrainingSettings,
    ) -> None:
        self._rank = rank
        self._executor = executor
        self._sharding = sharding
        self._loss_scaler = loss_scaler
        self._settings = settings

    def norm(self, run: StepRun, step: int) -> float | None:
        """Norm of all gradients before clipping, or None to skip the step; a collective over all.

        An overflow of fp16 gradients beneath a finite loss lowers the loss scale and skips the
        step, which is how dynamic scaling finds its scale. Otherwise the step is saved for replay
        by one rank of each replica, and then skipped or NonFiniteError is raised, as
        `training.on_nonfinite` says: a loss that is not finite, or gradients that overflow even at
        the smallest scale, no scale can cure.
        """
        loss_is_finite = math.isfinite(self._executor.loss_sum)
        square = self._sharding.squared_norm()
        bad = not (loss_is_finite and math.isfinite(square))
        mine = [float(bad), float(not loss_is_finite), 1.0, 0.0 if bad else square]
        votes = torch.tensor(mine, dtype=torch.float64, device=self._rank.device)
        dist.all_reduce(votes)
        *counts, square = votes.tolist()
        num_bad, num_bad_losses, num_ranks = (round(count) for count in counts)
        check_all_took_part(num_ranks, "step")
        if not num_bad:
            return math.sqrt(square / self._sharding.num_holders)
        scaler = self._loss_scaler
        if scaler is not None and not num_bad_losses and not is_exhausted(scaler):
            self._lower_scale(step)
            return None
        what = "loss is" if num_bad_losses else "gradients are"
        found = f"the {what} not finite on {num_bad} of {self._rank.world_size} ranks"
        self._save_or_stop(run, step, found)
        return None

    def _lower_scale(self, step: int) -> None:
        scaler = self._loss_scaler
        before = scaler.cur_scale
        scaler.update_scale(True)
        if self._rank.is_first:
            logger.warning(
                "step %d: fp16 gradients overflowed at loss scale %g, which is %g now; skipped",
                step,
                before,
                scaler.cur_scale,
            )

    def _save_or_stop(self, run: StepRun, step: int, found: str) -> None:
        """Save the step and end the run, or log that it is skipped, as the settings say."""
        folder, scaler = self._settings.failure_dir, self._loss_scaler
        name = f"step-{step:06d}-replica-{self._rank.replica}"
        if self._rank.is_planner:
            save_step(folder, name, run.plan, run.batch)
        scale = "" if scaler is None else f" at loss scale {scaler.cur_scale:g}"
        message = (
            f"step {step}: {found}{scale}; the step is saved as {folder}/{name}.json for "
            "'infinipipe replay'"
        )
        if self._settings.on_nonfinite == "stop":
            error = NonFiniteError(
                f"{message}. Lower the learning rate or clip gradients, or set "
                "infinipipe.training.on_nonfinite to skip"
            )
            raise refer(error, 0)
        if self._rank.is_first:
            logger.warning("%s, and skipped", message)
