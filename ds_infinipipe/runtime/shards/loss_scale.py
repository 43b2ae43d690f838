"""fp16: the loss scale, which DeepSpeed's scaler keeps, and the optimizers that must not apply it.

The scale a step's loss was multiplied by is divided out of its fp32 gradients once, when they are
complete (`runtime.shards`), so that hooks, norm and clipping see true gradients. DeepSpeed's
optimizers would divide by the scale they have already moved on to: at every growth of the scale
that halves the gradients of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

__all__ = ["adopt_loss_scaler", "is_exhausted"]


def adopt_loss_scaler(
    optimizer: Any,
    dtype: torch.dtype,
    zero_stage: int,
    scale: float,
    window: Mapping[str, Any] | None,
) -> Any:
    """The loss scaler of an fp16 run, also its optimizer's `loss_scaler`; None for other dtypes.

    `scale` is fixed, or 0 for a dynamic one, which `window` then describes in DeepSpeed's words.
    ZeRO-3 has DeepSpeed's scaler. Without ZeRO it is the same one, so that the stage does not
    change what a step does.
    """
    if dtype != torch.float16:
        return None
    if zero_stage == 3:
        optimizer.override_loss_scale(1.0)
    else:
        optimizer.loss_scaler = CreateLossScaler(dtype, scale, scale == 0, window)
    return optimizer.loss_scaler


def is_exhausted(scaler: Any) -> bool:
    """True if the next overflow cannot lower a dynamic scale any further."""
    if not scaler.dynamic:
        return False
    waits = scaler.delayed_shift > 1 and scaler.cur_hysteresis > 1
    return bool(scaler.cur_scale <= scaler.min_scale and not waits)
