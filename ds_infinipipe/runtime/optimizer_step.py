"""The end of a step, as a part of the engine: norm, clipping, DeepSpeed's optimizer, counters."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist

from ds_infinipipe.runtime.sharding import ReplicatedSharding, Sharding

__all__ = ["OptimizerStepMixin"]


class OptimizerStepMixin:
    """Stepping or skipping for the engine; `self` is an InfiniPipeEngine."""

    # what is used of the engine
    device: Any
    global_samples: int
    global_steps: int
    grid: Any
    gradient_clipping: Any
    loss_scaler: Any
    module: Any
    optimizer: Any
    sharding: Sharding
    skipped_steps: int
    train_batch_size: Any
    _exec_optimizer_step: Any
    _global_grad_norm: Any
    _whole_batch: Any

    def step_optimizer(self) -> None:
        """Clip, step and schedule as DeepSpeed does, counting the sequences that were trained."""
        if isinstance(self.sharding, ReplicatedSharding):
            self._step_replicated()
        else:
            self._exec_optimizer_step()
        self._count_samples()

    def skip_step(self) -> None:
        """Leave the weights as they are and go on with the next batch."""
        self._global_grad_norm = float("nan")
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._count_samples()

    def clip_fp32_gradients(self) -> None:
        """ZeRO-0 clipping by the norm over all stages, a weight tied across stages counted once."""
        factor = self.gradient_clipping() / (self._global_grad_norm + 1e-6)
        if factor < 1.0:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _step_replicated(self) -> None:
        norm = self._global_grad_norm = self._replicated_grad_norm()
        if self.loss_scaler is None:
            self._exec_optimizer_step()
            return
        if self.gradient_clipping() > 0:
            self.clip_fp32_gradients()  # DeepSpeed calls it for fp32 only
        self._exec_optimizer_step()
        self.loss_scaler.update_scale(self.optimizer.overflow)
        self._global_grad_norm = norm

    def _replicated_grad_norm(self) -> float:
        counted = [p.grad for p in self.module.parameters() if p.model_parallel]
        squares = [g.detach().double().square().sum() for g in counted if g is not None]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        total = total.to(self.device)
        dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        return float(total.sqrt())

    def _count_samples(self) -> None:
        # DeepSpeed counted its own train_batch_size, which is not the number of sequences
        self.global_samples += len(self._whole_batch.ids) - self.train_batch_size()

    def _get_optimizer_loss_scale(self) -> float | None:
        """What DeepSpeed's monitor shows; its optimizers have been told 1."""
        return None if self.loss_scaler is None else float(self.loss_scaler.cur_scale)
