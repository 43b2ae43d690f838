"""Optimizer states of ZeRO-3 partitions cut once more, over the replicas.

Replicas hold equal partitions of a stage's parameters. Here each keeps the masters and moments of
1/dp of its partition only: gradients are reduce-scattered over the replicas instead of summed, each
replica steps on its own part, and the new weights are gathered over the replicas once a step.

A *run* is what one layer's parameters have in one parameter group: one stretch of the flat buffers,
cut into equal parts. A weight tied across stages is a run of its own on either stage, so that both
copies are cut alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_infinipipe.errors import InfiniPipeError
from ds_infinipipe.runtime.ranks.surface import replace_partitions

__all__ = ["ReplicaCut"]

_ALIGNMENT = 8
"""Elements that a part is a multiple of, so that collectives find aligned memory."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Elements [start, start + length) of the flat buffers; `places` are its parameters' in it."""

    layer: int
    group: int
    start: int
    length: int
    places: dict[torch.nn.Parameter, int]

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        return tuple(self.places)


class ReplicaCut:
    """Lays DeepSpeed's partitions out for the cut, and keeps this replica's part of the states."""

    def __init__(
        self,
        optimizer: Any,
        owned: Sequence[Sequence[torch.nn.Parameter]],
        pg: Any,
        tied: torch.nn.Parameter | None = None,
    ) -> None:
        """`owned` has each parameter at one layer; `pg` holds the replicas of this rank."""
        self._optimizer = optimizer
        self._pg = pg
        self.replica = dist.get_rank(pg)
        self._num_replicas = dist.get_world_size(pg)
        self._runs = self._make_runs(owned, tied)
        self._by_parameter = {p: i for i, run in enumerate(self._runs) for p in run.places}
        total = sum(run.length for run in self._runs)
        places = {p: run.start + n for run in self._runs for p, n in run.places.items()}
        self._weights = replace_partitions(optimizer, places, total)
        self._replace_masters()
        self._replace_access()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """This replica's part of each run's gradients; final after the reduce-scatter."""
        return [self._own(run, self._buffer) for run in self._runs]

    @property
    def masters(self) -> list[tuple[torch.Tensor, tuple[torch.nn.Parameter, ...]]]:
        """This replica's part of each run's masters, and the run's parameters."""
        flats = self._optimizer.fp32_partitioned_groups_flat
        return [(flat, run.parameters) for flat, run in zip(flats, self._runs, strict=True)]

    def counted(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Those of `gradients` that belong to any of `parameters`."""
        wanted = {self._by_parameter[p] for p in parameters}
        return [g for index, g in enumerate(self.gradients) if index in wanted]

    def layer_gradients(self, layer: int) -> list[torch.Tensor]:
        """A layer's whole runs, as they are before the reduce-scatter."""
        return [self._whole(run, self._buffer) for run in self._runs if run.layer == layer]

    def reduce_scatter(self, gradients: torch.Tensor) -> Any:
        """Start to sum a whole run over the replicas, each its own part, in place."""
        own = gradients.chunk(self._num_replicas)[self.replica]
        return dist.reduce_scatter_tensor(own, gradients, group=self._pg, async_op=True)

    def own_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This replica's part of the run of a parameter."""
        return self.gradients[self._by_parameter[parameter]]

    def place(self, parameter: torch.nn.Parameter) -> tuple[int, int, int, int]:
        """Elements [low, high) of a parameter's partition are kept here: (run, offset, low, high).

        They lie at `offset` of the run's masters; low equals high where none is kept here.
        """
        index = self._by_parameter[parameter]
        run = self._runs[index]
        place = run.places[parameter]
        part = run.length // self._num_replicas
        begin = part * self.replica
        low = max(begin, place)
        high = max(low, min(begin + part, place + parameter.partition_numel()))  # type: ignore[attr-defined]
        return index, low - begin, low - place, high - place

    def publish(self) -> None:
        """Carry the masters over to the weights, and gather those over the replicas."""
        pending = []
        flats = self._optimizer.fp32_partitioned_groups_flat
        for flat, run in zip(flats, self._runs, strict=True):
            own = self._own(run, self._weights)
            own.copy_(flat.data)
            whole = self._whole(run, self._weights)
            pending.append(dist.all_gather_into_tensor(whole, own, group=self._pg, async_op=True))
        for work in pending:
            work.wait()

    @property
    def _buffer(self) -> torch.Tensor:
        buffer: torch.Tensor = self._optimizer.grad_partitions_flat_buffer
        return buffer

    def _own(self, run: _Run, buffer: torch.Tensor) -> torch.Tensor:
        part = run.length // self._num_replicas
        return buffer.narrow(0, run.start + self.replica * part, part)

    def _whole(self, run: _Run, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.narrow(0, run.start, run.length)

    def _make_runs(
        self, owned: Sequence[Sequence[torch.nn.Parameter]], tied: torch.nn.Parameter | None
    ) -> list[_Run]:
        groups = {
            parameter: self._optimizer.sub_group_to_group_id[index]
            for index, members in enumerate(self._optimizer.fp16_groups)
            for parameter in members
        }
        unit = _ALIGNMENT * self._num_replicas
        runs: list[_Run] = []
        start = 0
        for layer, group, members in _members(owned, groups, tied):
            places, end = {}, 0
            for parameter in members:
                places[parameter] = end
                end += parameter.partition_numel()  # type: ignore[attr-defined]
            length = -(-end // unit) * unit
            runs.append(_Run(layer, group, start, length, places))
            start += length
        return runs

    def _replace_masters(self) -> None:
        """A master of this replica's part for each run, in place of DeepSpeed's whole ones."""
        optimizer = self._optimizer
        before = optimizer.fp32_partitioned_groups_flat
        dtype, device = before[0].dtype, before[0].device
        before.clear()
        optimizer.sub_group_to_group_id = {i: run.group for i, run in enumerate(self._runs)}
        if optimizer.offload_optimizer:
            optimizer.subgroup_to_device = dict.fromkeys(range(len(self._runs)), "cpu")
        for run in self._runs:
            flat = self._own(run, self._weights).to(device, dtype, copy=True)
            flat.requires_grad = True
            before.append(flat)

    def _replace_access(self) -> None:
        """Let `deepspeed.utils.safe_get_*` gather over the replicas, and refuse `safe_set_*`."""
        optimizer = self._optimizer

        def gradient(param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
            return self._gather(param, self.gradients), self._by_parameter[param]

        def state(
            param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
        ) -> tuple[torch.Tensor, int]:
            flats = [flat.data for flat, _ in self.masters]
            if optim_state_key is not None:
                flats = [optimizer.optimizer.state[f][optim_state_key] for f, _ in self.masters]
            return self._gather(param, flats), self._by_parameter[param]

        def refuse(*_: Any, **__: Any) -> None:
            raise InfiniPipeError(
                "optimizer states cannot be set one by one while they are cut over the replicas: "
                "set infinipipe.parallel.shard_optimizer_over_dp to false"
            )

        optimizer._get_fp32_grad_state_partition = gradient
        optimizer._get_fp32_opt_state_partition = state
        for name in (
            "set_fp32_grad_for_param",
            "set_full_hp_param",
            "set_local_grad_for_param",
            "set_local_hp_param",
            "update_fp32_grad_for_param_vectorized",
        ):
            setattr(optimizer, name, refuse)

    def _gather(self, parameter: torch.nn.Parameter, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A parameter's partition on the device, from all replicas' parts of its run."""
        index = self._by_parameter[parameter]
        run, device = self._runs[index], get_accelerator().current_device_name()
        own = parts[index].to(device)
        whole = own.new_empty(run.length)
        dist.all_gather_into_tensor(whole, own, group=self._pg)
        place = run.places[parameter]
        return whole.narrow(0, place, parameter.partition_numel())  # type: ignore[attr-defined]


def _members(
    owned: Sequence[Sequence[torch.nn.Parameter]],
    groups: dict[torch.nn.Parameter, int],
    tied: torch.nn.Parameter | None,
) -> Iterator[tuple[int, int, list[torch.nn.Parameter]]]:
    """(layer, group, parameters) of every run, in the order of layers."""
    for layer, parameters in enumerate(owned):
        found: dict[tuple[int, bool], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter in groups:  # frozen ones are not
                found.setdefault((groups[parameter], parameter is tied), []).append(parameter)
        for (group, _), members in found.items():
            yield layer, group, members
