"""The optimizer's step on a rank's ZeRO-3 partitions, in place of DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch

from ds_infinipipe.runtime.shards.replica_cut import ReplicaCut

__all__ = ["PartitionStep"]


class PartitionStep:
    """What DeepSpeed's stage-3 `step` does once gradients are complete, scaled and finite.

    It steps on the gradients where they lie: DeepSpeed copies them into a second flat buffer first,
    and passes over them for overflow, norm and scale again, all of which is done already.
    """

    def __init__(self, optimizer: Any, cut: ReplicaCut | None = None) -> None:
        """With `cut`, the rank keeps a part of its partitions' states, else all of them."""
        self._optimizer = optimizer
        self._cut = cut
        self.gradients = _whole_groups(optimizer) if cut is None else cut.gradients
        """What each of the optimizer's flat masters steps on."""
        for flat, gradients in zip(self._masters, self.gradients, strict=True):
            # bound for good; DeepSpeed keeps those of an offloaded optimizer twice
            flat.grad = gradients if gradients.dtype == flat.dtype else None

    @property
    def _masters(self) -> list[torch.Tensor]:
        masters: list[torch.Tensor] = self._optimizer.fp32_partitioned_groups_flat
        return masters

    def __call__(self, closure: Any = None) -> None:
        """Step every group, and carry masters over to the partitions that are trained with."""
        optimizer = self._optimizer
        optimizer._pre_step()
        optimizer.overflow = False
        for index, (flat, gradients) in enumerate(zip(self._masters, self.gradients, strict=True)):
            is_cast = flat.grad is None
            if is_cast:
                flat.grad = gradients.to(flat.dtype)
            optimizer._optimizer_step(index)
            if is_cast:
                flat.grad = None
        self.publish()
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def publish(self) -> None:
        """Carry the masters over to the partitions that are trained with."""
        if self._cut is not None:
            self._cut.publish()
            return
        for index in range(len(self._masters)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(index)


def _whole_groups(optimizer: Any) -> list[torch.Tensor]:
    buffer, start, groups = optimizer.grad_partitions_flat_buffer, 0, []
    for flat in optimizer.fp32_partitioned_groups_flat:
        groups.append(buffer.narrow(0, start, flat.numel()))
        start += flat.numel()
    return groups
