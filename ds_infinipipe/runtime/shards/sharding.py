"""Who holds a stage's parameters between instructions, and how gradients leave a chunk.

`ReplicatedSharding` is ZeRO-0: nothing is partitioned. `zero3` has the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from deepspeed import comm as dist

from ds_infinipipe.runtime.shards.replica_sum import GradientSum, all_reduce_over, owned_parameters

__all__ = ["Layers", "ReplicatedSharding", "Sharding", "counts_in_norm", "squared_norm"]

Layers = Sequence[Sequence[torch.nn.Parameter]]
_BLOCK = 1 << 22


class Sharding(Protocol):
    """What the executor calls, in the same order on all ranks of a stage."""

    loss_multiplier: float
    """Factor on the loss, undone before `finish_gradients` returns: it makes up for averaging over
    the shard group, and in fp16 it is the loss scale."""
    is_synchronous: bool
    """Nothing runs ahead of its use or beside anything else; for debugging."""
    counts: dict[str, int]
    """Collectives started since the engine was built, by kind."""
    keeps_gathered: bool
    """Whether `release` waits for `release_all`: one gather of a layer a step."""

    takes_gradients: bool
    """Whether `reduce` takes gradients out of `.grad`, or a step's are added up there."""

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""

    def prefetch(self, layer: int) -> None:
        """Start to gather a layer's parameters."""

    def fetch(self, layer: int) -> None:
        """Make a layer's parameters usable, waiting for a prefetch if there was one."""

    def release(self, layer: int) -> None:
        """Drop the gathered parameters of a layer, unless they are to be kept."""

    def release_all(self) -> None:
        """Drop the gathered parameters of the stage."""

    def reduce(self, layer: int) -> None:
        """The layer has fresh gradients in `.grad`: take them for reduction, if they are."""

    def flush(self) -> None:
        """Reduce what is pending; needed before a parameter gets its next gradient."""

    def settle(self, layer: int) -> None:
        """The layer has its last gradient of the step: start to sum it over the replicas.

        Called from the last layer to the first; layers that are left out follow at the end.
        """

    def finish_gradients(self, tied: torch.nn.Parameter | None, tied_pg: Any) -> None:
        """Complete the gradients of the step; `tied` is this stage's copy of a tied weight."""

    num_holders: int
    """Ranks that hold the same gradients at the end of a step, each of which counts them."""

    def squared_norm(self) -> float:
        """Of the gradients this rank holds at the end of a step, less the second copy of a tied
        weight; not finite where one of them is not."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients, to clip them."""

    def full_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The whole gradient, a collective over the stage; call before the optimizer steps."""


class ReplicatedSharding:
    """ZeRO-0: every rank of a stage holds all parameters; gradients are summed once per step.

    Gradients of fp16 parameters accumulate in float32.
    """

    def __init__(self, layers: Layers, gradient_pg: Any, loss_scaler: Any = None) -> None:
        """`gradient_pg` has all ranks of the stage in all replicas; None where this is the one."""
        self.num_holders = 1 if gradient_pg is None else dist.get_world_size(gradient_pg)
        self._owned = owned_parameters(layers)
        self._sum = GradientSum(len(self._owned), self._gradients_of, all_reduce_over(gradient_pg))
        self._is_alone = gradient_pg is None
        self._loss_scaler = loss_scaler
        self.loss_multiplier = 1.0
        self.takes_gradients = False
        self.is_synchronous = False
        self.counts = {"gather": 0, "reduce": 0, "sum": 0}
        self.keeps_gathered = False
        for parameter in self._parameters():
            parameter.grad = None
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)

    def begin_step(self) -> None:
        if self._loss_scaler is not None:
            self.loss_multiplier = float(self._loss_scaler.cur_scale)
        self._sum.begin_step()
        for parameter in self._parameters():
            parameter.grad = None

    def prefetch(self, layer: int) -> None:
        """Parameters are always here."""

    def fetch(self, layer: int) -> None:
        """Parameters are always here."""

    def release(self, layer: int) -> None:
        """Parameters stay."""

    def release_all(self) -> None:
        """Parameters stay."""

    def reduce(self, layer: int) -> None:
        """Gradients accumulate in `.grad` until the end of the step."""

    def flush(self) -> None:
        """Nothing is pending before the end of the step."""

    def settle(self, layer: int) -> None:
        if not self._is_alone and not self.is_synchronous:
            self._sum.start(layer)

    def finish_gradients(self, tied: torch.nn.Parameter | None, tied_pg: Any) -> None:
        for layer in range(len(self._owned)):
            self._gradients_of(layer)
        if not self._is_alone:
            self._sum.finish()
            self.counts["sum"] = self._sum.started
        if self._loss_scaler is not None:
            for parameter in self._parameters():
                assert parameter.grad is not None
                parameter.grad.div_(self.loss_multiplier)
        if tied is not None:
            dist.all_reduce(tied.grad, group=tied_pg)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return itertools.chain.from_iterable(self._owned)

    def _gradients_of(self, layer: int) -> list[torch.Tensor]:
        """Those of the layer's own parameters; zeros where a replica had nothing to do."""
        for parameter in self._owned[layer]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        return [p.grad for p in self._owned[layer] if p.grad is not None]

    def squared_norm(self) -> float:
        gradients = [p.grad for p in self._parameters() if counts_in_norm(p)]
        return squared_norm(g for g in gradients if g is not None)

    def scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def full_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad


def counts_in_norm(parameter: torch.nn.Parameter) -> bool:
    """False for the second copy of a weight that is tied across stages."""
    return parameter.requires_grad and parameter.model_parallel  # type: ignore[attr-defined]


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Sum of the squares of all elements; not finite where an element is not. Waits for the device.

    One pass in the tensors' own precision; blocks are added up in double precision, so that
    rounding does not grow with the size of a tensor.
    """
    blocks = [block for t in tensors for block in t.detach().view(-1).split(_BLOCK)]
    total = _sum_of_squares(blocks)
    if math.isfinite(total):
        return total
    # squares of finite float32 above 1.8e19 are not finite
    return _sum_of_squares(blocks, torch.float64)


def _sum_of_squares(blocks: list[torch.Tensor], dtype: torch.dtype | None = None) -> float:
    if not blocks:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(block, dtype=dtype) for block in blocks])
    return float(norms.double().square().sum())
