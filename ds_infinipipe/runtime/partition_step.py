"""The optimizer's step on a rank's ZeRO-3 partitions, in place of DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PartitionStep"]


class PartitionStep:
    """What DeepSpeed's stage-3 `step` does once gradients are complete, scaled and finite.

    It steps on the gradients where they lie: DeepSpeed copies them into a second flat buffer first,
    and passes over them for overflow, norm and scale again, all of which is done already.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        buffer, start = optimizer.grad_partitions_flat_buffer, 0
        self._gradients: list[torch.Tensor] = []
        for flat in optimizer.fp32_partitioned_groups_flat:
            self._gradients.append(buffer.narrow(0, start, flat.numel()))
            start += flat.numel()
            # DeepSpeed keeps those of an offloaded optimizer twice
            flat.grad = self._gradients[-1] if buffer.dtype == flat.dtype else None

    def __call__(self, closure: Any = None) -> None:
        """Step every group, and carry masters over to the partitions that are trained with."""
        optimizer = self._optimizer
        optimizer._pre_step()
        optimizer.overflow = False
        for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            is_cast = flat.grad is None
            if is_cast:
                flat.grad = self._gradients[index].to(flat.dtype)
            optimizer._optimizer_step(index)
            if is_cast:
                flat.grad = None
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
