"""Sums gradients over the replicas layer by layer, while the layers below are still in backward.

A layer's gradients are final after its backward in the last chunk. From then on its sum can run
beside the backward of the layers below, on a communicator of its own, so that it cannot get between
the gathers and reductions of the stage in another order on another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

__all__ = [
    "GradientSum",
    "all_reduce_over",
    "join_neighbours",
    "owned_parameters",
    "sum_hosted",
]

_HOSTED_BLOCK = 1 << 24


class GradientSum:
    """One step's sums, started in one order on every rank: from the last layer to the first.

    A replica without work starts the same sums at its end. Addition has no order of its own, so the
    result does not depend on who comes when.
    """

    def __init__(
        self,
        num_layers: int,
        gradients: Callable[[int], Sequence[torch.Tensor]],
        add_up: Callable[[torch.Tensor], Any],
    ) -> None:
        """`gradients(layer)` are a layer's tensors, and `add_up` starts the sum of one in place."""
        self._num_layers = num_layers
        self._gradients = gradients
        self._add_up = add_up
        self._next = num_layers - 1
        self._pending: list[Any] = []
        self.started = 0
        """Sums since this was built."""

    def begin_step(self) -> None:
        """Start again from the last layer."""
        self._next = self._num_layers - 1
        self._pending.clear()

    def start(self, layer: int) -> None:
        """Start the sums of this layer and of those above it that have not started."""
        while self._next >= layer:
            for gradient in self._gradients(self._next):
                self._pending.append(self._add_up(gradient))
                self.started += 1
            self._next -= 1

    def finish(self) -> None:
        """Start what has not started, and wait for all; raises where a peer failed."""
        self.start(0)
        for work in self._pending:
            work.wait()
        self._pending.clear()


def all_reduce_over(pg: Any) -> Callable[[torch.Tensor], Any]:
    """Starts to add a tensor up over the ranks of `pg`, in place and on all of them."""
    return lambda tensor: dist.all_reduce(tensor, group=pg, async_op=True)


def owned_parameters(
    layers: Sequence[Sequence[torch.nn.Parameter]],
) -> list[list[torch.nn.Parameter]]:
    """Each parameter once, at the layer whose backward comes last: the first that has it."""
    seen: set[int] = set()
    owned = []
    for parameters in layers:
        owned.append([p for p in parameters if id(p) not in seen])
        seen.update(id(p) for p in parameters)
    return owned


def join_neighbours(views: Sequence[torch.Tensor], buffer: torch.Tensor) -> list[torch.Tensor]:
    """Views of a flat buffer in its order, those that touch made one."""
    runs: list[tuple[int, int]] = []
    for view in sorted(views, key=lambda view: view.storage_offset()):
        start = int(view.storage_offset() - buffer.storage_offset())
        end = start + view.numel()
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, end))
    return [buffer.narrow(0, start, end - start) for start, end in runs]


def sum_hosted(tensor: torch.Tensor, pg: Any) -> int:
    """Add up a flat tensor of host memory over the ranks of `pg`, in place, through the device.

    NCCL reduces device memory only. Blocks bound what that takes: 64 MiB of float32. Returns the
    number of all-reduces.
    """
    device = get_accelerator().current_device_name()
    blocks = tensor.split(_HOSTED_BLOCK)
    for block in blocks:
        there = block.to(device)
        dist.all_reduce(there, group=pg)
        block.copy_(there)
    return len(blocks)
