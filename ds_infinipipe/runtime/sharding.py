"""Who holds a stage's parameters between instructions, and how gradients leave a chunk.

`Zero3Sharding` keeps DeepSpeed's stage-3 optimizer for partitions, master weights, clipping and the
step, but removes its module hooks and calls gather, release and reduce itself. The hooks assume one
fixed order of one forward and one backward per micro-batch; here several chunks are in flight and
the order changes each step, under which the hooks deadlock (they broadcast on the world group) or
lose gradients silently. `ReplicatedSharding` is ZeRO-0: nothing is partitioned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param
from deepspeed.utils import safe_get_full_grad

from ds_infinipipe.runtime.gradient_sum import (
    GradientSum,
    join_neighbours,
    owned_parameters,
    sum_hosted,
)
from ds_infinipipe.runtime.surface import (
    abandon_zero3_step,
    check_zero3_optimizer,
    gradient_partition,
    hand_over_gradients,
    reduce_pending_gradients,
)

__all__ = ["ReplicatedSharding", "Sharding", "Zero3Sharding"]

Layers = Sequence[Sequence[torch.nn.Parameter]]


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

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""

    def abandon(self) -> None:
        """After an error, with no peer left that answers: forget the step's gradients and whatever
        was gathered."""

    def prefetch(self, layer: int) -> None:
        """Start to gather a layer's parameters."""

    def fetch(self, layer: int) -> None:
        """Make a layer's parameters usable, waiting for a prefetch if there was one."""

    def release(self, layer: int) -> None:
        """Drop the gathered parameters of a layer, unless they are to be kept."""

    def release_all(self) -> None:
        """Drop the gathered parameters of the stage."""

    def reduce(self, layer: int) -> None:
        """Take the layer's fresh gradients out of `.grad` for reduction."""

    def flush(self) -> None:
        """Reduce what is pending; needed before a parameter gets its next gradient."""

    def settle(self, layer: int) -> None:
        """The layer has its last gradient of the step: start to sum it over the replicas.

        Called from the last layer to the first; layers that are left out follow at the end.
        """

    def finish_gradients(self, tied: torch.nn.Parameter | None, tied_pg: Any) -> None:
        """Complete the gradients of the step; `tied` is this stage's copy of a tied weight."""

    def gradients_are_finite(self) -> bool:
        """True if every gradient this rank holds at the end of a step is a finite number."""

    def full_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The whole gradient, a collective over the stage; call before the optimizer steps."""


class Zero3Sharding:
    """Explicit gather, release and reduce on DeepSpeed's stage-3 optimizer."""

    def __init__(
        self,
        optimizer: Any,
        layers: Layers,
        shard_size: int,
        replica_pg: Any = None,
        loss_scaler: Any = None,
    ) -> None:
        check_zero3_optimizer(optimizer)
        self._optimizer = optimizer
        self._layers = [list(parameters) for parameters in layers]
        self._in_flight: dict[int, Any] = {}
        self._shard_size = float(shard_size)  # which reduce-scatter divides by
        self._loss_scaler = loss_scaler
        self.loss_multiplier = self._shard_size
        self.counts = {"gather": 0, "reduce": 0, "sum": 0}
        self.keeps_gathered = False
        self.is_synchronous = False
        self._is_hosted = bool(optimizer.offload_optimizer)
        self._replica_pg = replica_pg
        sums_early = replica_pg is not None and not self._is_hosted
        self._sum = self._make_sum(replica_pg) if sums_early else None
        optimizer.parameter_offload._remove_module_hooks()
        for hook in [*optimizer._grad_acc_hooks, *optimizer._leaf_module_hooks]:
            hook.remove()

    def _make_sum(self, replica_pg: Any) -> GradientSum:
        buffer = self._optimizer.grad_partitions_flat_buffer
        runs = [
            join_neighbours([gradient_partition(self._optimizer, p) for p in owned], buffer)
            for owned in owned_parameters(self._layers)
        ]
        return GradientSum(len(runs), runs.__getitem__, replica_pg)

    def begin_step(self) -> None:
        # The optimizer copies a partition when micro_step_id is 0 and adds otherwise. Parameters
        # get their first gradient of a step at different flushes (the head's come in a forward),
        # so always add, onto zeros.
        self._optimizer.grad_partitions_flat_buffer.zero_()
        if self._loss_scaler is not None:
            self.loss_multiplier = float(self._loss_scaler.cur_scale)
        self._optimizer.set_gradient_accumulation_boundary(False)
        self._optimizer.micro_step_id = 1
        self._optimizer._epilogue_ran_this_backward = False
        if self._sum is not None:
            self._sum.begin_step()

    def abandon(self) -> None:
        self._in_flight.clear()
        if self._sum is not None:
            self._sum.abandon()
        abandon_zero3_step(self._optimizer)
        for parameter in itertools.chain.from_iterable(self._layers):
            parameter.grad = None
            # Also those that persist: where one rank had waited for their gather and another had
            # not, the next gather would be of different sizes.
            free_param(parameter)

    def prefetch(self, layer: int) -> None:
        if not self.is_synchronous:
            self._gather(layer)

    def _gather(self, layer: int) -> None:
        if layer in self._in_flight:
            return
        missing = [p for p in self._layers[layer] if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            self._in_flight[layer] = missing[0].all_gather_coalesced(missing)
            self.counts["gather"] += 1

    def fetch(self, layer: int) -> None:
        self._gather(layer)
        handle = self._in_flight.pop(layer, None)
        if handle is not None:
            handle.wait()

    def release(self, layer: int) -> None:
        if not self.keeps_gathered:
            self._partition(layer)

    def release_all(self) -> None:
        for layer in range(len(self._layers)):
            self._partition(layer)

    def _partition(self, layer: int) -> None:
        for parameter in self._layers[layer]:
            if not parameter.ds_persist and parameter.ds_status == ZeroParamStatus.AVAILABLE:
                parameter.partition()

    def reduce(self, layer: int) -> None:
        for parameter in self._layers[layer]:
            if parameter.grad is not None:
                self._optimizer.reduce_ready_partitions_and_remove_grads(parameter)

    def flush(self) -> None:
        # The next gradient of a parameter only needs the bucket to be empty. The stream of the
        # reductions keeps their order, so the host does not wait for it before the step's end.
        reduce_pending_gradients(self._optimizer)
        if self.is_synchronous and not get_accelerator().is_synchronized_device():
            self._optimizer.reduce_and_partition_stream.synchronize()
        self.counts["reduce"] += 1

    def settle(self, layer: int) -> None:
        if self._sum is None or self.is_synchronous:
            return
        self.flush()
        # behind the layer's reduction, which is queued in this stream
        with get_accelerator().stream(self._optimizer.reduce_and_partition_stream):
            self._sum.start(layer)

    def finish_gradients(self, tied: torch.nn.Parameter | None, tied_pg: Any) -> None:
        self.release_all()
        # also where a replica had nothing to do, as it fills averaged_gradients
        self._optimizer.independent_gradient_partition_epilogue()
        if self._sum is not None:
            self._sum.finish()
            self.counts["sum"] = self._sum.started
        elif self._replica_pg is not None:
            buffer = self._optimizer.grad_partitions_flat_buffer
            self.counts["sum"] += sum_hosted(buffer, self._replica_pg)
        if self._loss_scaler is not None:
            factor = self._shard_size / self.loss_multiplier
            self._optimizer.grad_partitions_flat_buffer.mul_(factor)
        if tied is not None:
            # both copies are partitioned alike, so partitions pair up by shard index
            partition = gradient_partition(self._optimizer, tied)
            if self._is_hosted:
                sum_hosted(partition, tied_pg)
            else:
                dist.all_reduce(partition, group=tied_pg)
        if self._is_hosted:
            hand_over_gradients(self._optimizer)

    def gradients_are_finite(self) -> bool:
        return _is_finite(self._optimizer.grad_partitions_flat_buffer)

    def full_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return safe_get_full_grad(parameter)


class ReplicatedSharding:
    """ZeRO-0: every rank of a stage holds all parameters; gradients are summed once per step.

    Gradients of fp16 parameters accumulate in float32.
    """

    def __init__(self, layers: Layers, gradient_pg: Any, loss_scaler: Any = None) -> None:
        """`gradient_pg` has all ranks of the stage in all replicas; None where this is the one."""
        self._owned = owned_parameters(layers)
        self._sum = GradientSum(len(self._owned), self._gradients_of, gradient_pg)
        self._is_alone = gradient_pg is None
        self._loss_scaler = loss_scaler
        self.loss_multiplier = 1.0
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

    def abandon(self) -> None:
        self._sum.abandon()
        self.begin_step()

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

    def gradients_are_finite(self) -> bool:
        return all(_is_finite(p.grad) for p in self._parameters() if p.grad is not None)

    def full_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad


def _is_finite(tensor: torch.Tensor) -> bool:
    # the largest magnitude is found in one pass and passes on what is not a number
    return bool(torch.linalg.vector_norm(tensor, ord=float("inf")).isfinite())
