"""Two stages on one device: gloo carries what NCCL would refuse to send to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from gpu_checks.measure import Row

__all__ = ["check_two_ranks"]


def check_two_ranks() -> Iterator[Row]:
    """Loss and gradients of pp 2 against the plain model, in float32 and without ZeRO."""
    from ds_infinipipe.runtime.ranks.local import run_local_ranks

    by_rank = run_local_ranks(_compare, 2)
    worst_loss = max(abs(step["loss_error"]) for rank in by_rank for step in rank)
    worst_gradient = max(step["gradient_error"] for rank in by_rank for step in rank)
    yield Row("two ranks", "loss error", worst_loss, "", "<= 1e-4", worst_loss <= 1e-4)
    yield Row("two ranks", "gradient error", worst_gradient, "", "<= 1e-3", worst_gradient <= 1e-3)


def _compare() -> list[dict[str, Any]]:
    os.environ["LOCAL_RANK"] = "0"  # both ranks use the one device
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    torch.distributed.init_process_group("gloo")
    from ds_infinipipe.checks.exactness import Case, compare_steps

    return [asdict(step) for step in compare_steps(Case(pp=2, sp=1, zero_stage=0, steps=2))]
