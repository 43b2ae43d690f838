"""The end of a step, as a part of the engine: norm, clipping, DeepSpeed's optimizer, counters."""

from __future__ import annotations

from typing import Any

from ds_infinipipe.runtime.sharding import Sharding

__all__ = ["OptimizerStepMixin"]


class OptimizerStepMixin:
    """Stepping or skipping for the engine; `self` is an InfiniPipeEngine."""

    # what is used of the engine
    global_samples: int
    global_steps: int
    gradient_clipping: Any
    gradient_norm: float
    loss_scaler: Any
    optimizer: Any
    sharding: Sharding
    skipped_steps: int
    train_batch_size: Any
    _exec_optimizer_step: Any
    _global_grad_norm: Any
    _whole_batch: Any

    def step_optimizer(self) -> None:
        """Clip, step and schedule as DeepSpeed does, counting the sequences that were trained.

        `gradient_norm` is over all stages, a weight tied across stages counted once.
        """
        limit = self.gradient_clipping()
        factor = limit / (self.gradient_norm + 1e-6) if limit > 0 else 1.0
        if factor < 1.0:
            self.sharding.scale_gradients(factor)
        self._exec_optimizer_step()
        if self.loss_scaler is not None:
            self.loss_scaler.update_scale(self.optimizer.overflow)
        self._global_grad_norm = self.gradient_norm
        self._count_samples()

    def skip_step(self) -> None:
        """Leave the weights as they are and go on with the next batch."""
        self._global_grad_norm = float("nan")
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._count_samples()

    def clip_fp32_gradients(self) -> None:
        """They are clipped already."""

    def _count_samples(self) -> None:
        # DeepSpeed counted its own train_batch_size, which is not the number of sequences
        self.global_samples += len(self._whole_batch.ids) - self.train_batch_size()

    def _get_optimizer_loss_scale(self) -> float | None:
        """What DeepSpeed's monitor shows; its optimizers have been told 1."""
        return None if self.loss_scaler is None else float(self.loss_scaler.cur_scale)
