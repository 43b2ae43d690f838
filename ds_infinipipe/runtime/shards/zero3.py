"""ZeRO-3: gather, release and reduce where the plan's instructions ask for them.

DeepSpeed's stage-3 optimizer keeps the partitions and the master weights, but its module hooks are
removed and every collective is called from here. The hooks assume one fixed order of one forward
and one backward per micro-batch; here several chunks are in flight and the order changes each step,
under which the hooks deadlock (they broadcast on the world group) or lose gradients silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad

from ds_infinipipe.runtime.ranks.surface import (
    check_zero3_optimizer,
    gradient_partition,
    reduce_pending_gradients,
)
from ds_infinipipe.runtime.shards.replica_cut import ReplicaCut
from ds_infinipipe.runtime.shards.replica_sum import (
    GradientSum,
    all_reduce_over,
    join_neighbours,
    owned_parameters,
    sum_hosted,
)
from ds_infinipipe.runtime.shards.sharding import Layers, counts_in_norm, squared_norm
from ds_infinipipe.runtime.shards.step import PartitionStep

__all__ = ["Zero3Sharding"]


class Zero3Sharding:
    """Explicit gather, release and reduce on DeepSpeed's stage-3 optimizer."""

    def __init__(
        self,
        optimizer: Any,
        layers: Layers,
        shard_size: int,
        replica_pg: Any = None,
        loss_scaler: Any = None,
        cuts_states: bool = False,
        tied: torch.nn.Parameter | None = None,
    ) -> None:
        """`replica_pg` holds the replicas of this rank, if there are several; `cuts_states` cuts
        the optimizer's states over them. `tied` is this stage's copy of a tied weight.
        """
        check_zero3_optimizer(optimizer)
        self._optimizer = optimizer
        self._layers: list[list[Any]] = [list(parameters) for parameters in layers]
        """Parameters with what DeepSpeed has added to them."""
        self._in_flight: dict[int, Any] = {}
        self._loss_scaler = loss_scaler
        self.counts = {"gather": 0, "reduce": 0, "sum": 0}
        self.keeps_gathered = False
        self.is_synchronous = False
        self._is_hosted = bool(optimizer.offload_optimizer)
        # a partition that is the whole parameter gets its gradients without being reduced
        self.takes_gradients = shard_size > 1 or self._is_hosted
        self._shard_size = float(shard_size)  # which reduce-scatter divides by
        self.loss_multiplier = self._shard_size
        self._replica_pg = replica_pg
        owned = owned_parameters(self._layers)
        is_cut = cuts_states and replica_pg is not None
        self.cut = ReplicaCut(optimizer, owned, replica_pg, tied) if is_cut else None
        is_repeated = replica_pg is not None and not is_cut
        self.num_holders = dist.get_world_size(replica_pg) if is_repeated else 1
        self._sum = self._make_sum(owned)
        self._counted = self._partitions([p for layer in owned for p in layer if counts_in_norm(p)])
        self._step = optimizer.step = PartitionStep(optimizer, self.cut)
        self._remove_hooks()
        if not self.takes_gradients:
            for parameter in itertools.chain.from_iterable(self._layers):
                parameter.grad = None
                parameter.grad_dtype = optimizer.grad_partitions_flat_buffer.dtype

    def _remove_hooks(self) -> None:
        optimizer = self._optimizer
        optimizer.parameter_offload._remove_module_hooks()
        for hook in [*optimizer._grad_acc_hooks, *optimizer._leaf_module_hooks]:
            hook.remove()

    def _partitions(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Complete gradients of parameters, as few stretches of the buffer."""
        if self.cut is not None:
            return self.cut.counted(parameters)
        trained = [p for p in parameters if p.requires_grad]
        partitions = [gradient_partition(self._optimizer, p) for p in trained]
        return join_neighbours(partitions, self._optimizer.grad_partitions_flat_buffer)

    def _make_sum(self, owned: Layers) -> GradientSum | None:
        if self._replica_pg is None or self._is_hosted:
            return None
        if self.cut is not None:
            return GradientSum(len(owned), self.cut.layer_gradients, self.cut.reduce_scatter)
        runs = [self._partitions(parameters) for parameters in owned]
        return GradientSum(len(runs), runs.__getitem__, all_reduce_over(self._replica_pg))

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
        if not self.takes_gradients:
            self._bind_gradients()

    def _bind_gradients(self) -> None:
        """Let autograd add each gradient onto the zeros of its partition."""
        for layer, parameters in enumerate(self._layers):
            self.fetch(layer)
            for parameter in parameters:
                if parameter.grad is None and parameter.requires_grad:
                    partition = gradient_partition(self._optimizer, parameter)
                    whole = partition.narrow(0, 0, parameter.numel())
                    parameter.grad = whole.view(parameter.shape)

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
        if self._shard_size == 1:
            return  # gathered parameters are views of their partitions
        for parameter in self._layers[layer]:
            if not parameter.ds_persist and parameter.ds_status == ZeroParamStatus.AVAILABLE:
                parameter.partition()

    def reduce(self, layer: int) -> None:
        if not self.takes_gradients:
            return
        for parameter in self._layers[layer]:
            if parameter.grad is not None:
                self._optimizer.reduce_ready_partitions_and_remove_grads(parameter)

    def flush(self) -> None:
        if not self.takes_gradients:
            return
        # The next gradient of a parameter only needs the bucket to be empty. The stream of the
        # reductions keeps their order, so the host does not wait for it before the step's end.
        reduce_pending_gradients(self._optimizer)
        if self.is_synchronous and not get_accelerator().is_synchronized_device():
            self._optimizer.reduce_and_partition_stream.synchronize()
        self.counts["reduce"] += 1

    def settle(self, layer: int) -> None:
        if self._sum is None or self.is_synchronous:
            return
        if not self.takes_gradients:
            self._sum.start(layer)
            return
        self.flush()
        # behind the layer's reduction, which is queued in this stream
        with get_accelerator().stream(self._optimizer.reduce_and_partition_stream):
            self._sum.start(layer)

    def finish_gradients(self, tied: torch.nn.Parameter | None, tied_pg: Any) -> None:
        self.release_all()
        if not self.takes_gradients:
            # DeepSpeed's `zero_grad`, which follows its step, trips over gradients it finds
            for parameter in itertools.chain.from_iterable(self._layers):
                parameter.grad = None
        # also where a replica had nothing to do, as it waits for the stream of the reductions
        self._optimizer.independent_gradient_partition_epilogue()
        if self._sum is not None:
            self._sum.finish()
            self.counts["sum"] = self._sum.started
        elif self._replica_pg is not None:
            buffer = self._optimizer.grad_partitions_flat_buffer
            self.counts["sum"] += sum_hosted(buffer, self._replica_pg)
        if self._loss_scaler is not None:
            self.scale_gradients(self._shard_size / self.loss_multiplier)
        if tied is not None:
            self._sum_tied(tied, tied_pg)

    def _sum_tied(self, tied: torch.nn.Parameter, tied_pg: Any) -> None:
        # both copies are partitioned and cut alike, so that parts pair up by rank and replica
        whole = gradient_partition(self._optimizer, tied)
        part = whole if self.cut is None else self.cut.own_gradient(tied)
        if self._is_hosted:
            sum_hosted(part, tied_pg)
        else:
            dist.all_reduce(part, group=tied_pg)

    def squared_norm(self) -> float:
        return squared_norm(self._counted)

    def scale_gradients(self, factor: float) -> None:
        for gradients in self._step.gradients:
            gradients.mul_(factor)

    def full_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient: torch.Tensor = safe_get_full_grad(parameter)
        return gradient
