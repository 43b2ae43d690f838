"""A rank's share of weights and optimizer states, as flat views by Hugging Face name.

Under ZeRO-3 the views lie in the stage-3 optimizer's flat fp32 buffers, so that nothing is gathered
to save; under ZeRO-0 they are whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ds_infinipipe.errors import CheckpointError
from ds_infinipipe.runtime.checkpoint.manifest import WEIGHT
from ds_infinipipe.runtime.shards.replica_cut import ReplicaCut

__all__ = ["Share", "TrainingState", "full_shape", "make_state"]


@dataclass(frozen=True)
class Share:
    """Elements [start, end) of a parameter that this rank keeps.

    `tensors` are 1-D views of end - start elements: `weight` is the master, the others are the
    optimizer's. `counters` are its numbers, such as `step`.
    """

    name: str
    start: int
    end: int
    tensors: Mapping[str, Tensor]
    counters: Mapping[str, float] = field(default_factory=dict)


class TrainingState(Protocol):
    """What saving reads and loading fills."""

    shard: int
    """Which part of its stage's states this rank keeps; replicas of a part have the same number."""

    def shares(self) -> list[Share]:
        """This rank's shares; where both ends of a tied weight meet, it appears once."""

    def allocate(self, kinds: Mapping[str, Sequence[str]], counters: _Counters) -> None:
        """Give each parameter exactly the optimizer states `kinds` and numbers `counters`."""

    def begin_load(self) -> None:
        """Drop gathered copies; a collective of the stage's ranks."""

    def finish_load(self) -> None:
        """Carry the masters over to the weights that are trained with; a collective too."""


_Counters = Mapping[str, Mapping[str, float]]
_Named = Iterable[tuple[str, torch.nn.Parameter]]


def make_state(
    parameters: _Named, optimizer: Any, zero_stage: int, cut: ReplicaCut | None = None
) -> TrainingState:
    """The states of a stage; CheckpointError for an optimizer whose states cannot be reached.

    `cut` is how ZeRO-3's are cut over the replicas, if they are.
    """
    named = dict(parameters)
    if zero_stage == 3:
        return _ShardedState(named, optimizer, cut)
    return _WholeState(named, optimizer)


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Shape of the parameter as a whole."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class _ShardedState:
    """ZeRO-3: partitions of DeepSpeed's stage-3 optimizer; frozen parameters are in none."""

    def __init__(
        self, named: Mapping[str, torch.nn.Parameter], optimizer: Any, cut: ReplicaCut | None
    ) -> None:
        if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
            raise CheckpointError(
                "states on NVMe cannot be saved or loaded: offload to the CPU instead"
            )
        self._named = named
        self._optimizer = optimizer
        self._cut = cut
        self._trained = {p for group in optimizer.fp16_groups for p in group}
        pg = next(iter(named.values())).ds_process_group  # type: ignore[attr-defined]
        self._rank = torch_dist.get_rank(pg)
        self.shard = self._rank
        if cut is not None:
            self.shard += cut.replica * torch_dist.get_world_size(pg)

    def shares(self) -> list[Share]:
        return [s for s in map(self._share, self._named.items()) if s.start < s.end]

    def _share(self, item: tuple[str, torch.nn.Parameter]) -> Share:
        name: str = item[0]
        parameter: Any = item[1]  # with what DeepSpeed adds to it
        size = parameter.ds_tensor.ds_numel
        first = size * self._rank
        if parameter not in self._trained:
            is_mine = self._cut is None or self._cut.replica == 0
            start, end = self._clip(parameter, first, first + size * is_mine)
            return Share(name, start, end, {WEIGHT: parameter.ds_tensor.data[: end - start]})
        index, offset, low, high = self._place(parameter)
        # the last partition is padded
        start, end = self._clip(parameter, first + low, first + high)
        flat = self._optimizer.fp32_partitioned_groups_flat[index]
        tensors, counters = _split(self._owner(index).state.get(flat, {}), flat)
        views = {
            kind: tensor.data[offset : offset + end - start]
            for kind, tensor in {WEIGHT: flat, **tensors}.items()
        }
        return Share(name, start, end, views, counters)

    def _clip(self, parameter: Any, start: int, end: int) -> tuple[int, int]:
        return min(start, parameter.ds_numel), min(end, parameter.ds_numel)

    def _place(self, parameter: torch.nn.Parameter) -> tuple[int, int, int, int]:
        """(flat master, offset in it, from where to where in the partition)."""
        if self._cut is not None:
            return self._cut.place(parameter)
        optimizer = self._optimizer
        group, offset, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return group, offset, 0, count

    def _members(self) -> list[Sequence[torch.nn.Parameter]]:
        """The parameters that share each flat master."""
        if self._cut is not None:
            return [parameters for _, parameters in self._cut.masters]
        return list(self._optimizer.fp16_groups)

    def _owner(self, group: int) -> Any:
        """The optimizer that steps a group; with partial offload there are two."""
        optimizer = self._optimizer
        if optimizer.offload_optimizer and optimizer.subgroup_to_device[group] != "cpu":
            return optimizer.backup_optimizer
        return optimizer.optimizer

    def allocate(self, kinds: Mapping[str, Sequence[str]], counters: _Counters) -> None:
        names = {parameter: name for name, parameter in self._named.items()}
        for index, group in enumerate(self._members()):
            members = [names[p] for p in group if p in names]
            flat = self._optimizer.fp32_partitioned_groups_flat[index]
            _allocate(self._owner(index), flat, members, kinds, counters)

    def begin_load(self) -> None:
        self._optimizer.checkpoint_event_prologue()

    def finish_load(self) -> None:
        self._optimizer.step.publish()
        self._optimizer.checkpoint_event_epilogue()


class _WholeState:
    """ZeRO-0: whole tensors. fp32 parameters are their own masters, halves have some beside."""

    shard = 0

    def __init__(self, named: Mapping[str, torch.nn.Parameter], optimizer: Any) -> None:
        self._named = named
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._masters: Mapping[torch.nn.Parameter, Tensor] = getattr(optimizer, "masters", {})

    def shares(self) -> list[Share]:
        return [self._share(*item) for item in self._named.items()]

    def _share(self, name: str, parameter: torch.nn.Parameter) -> Share:
        master = self._masters.get(parameter, parameter)
        tensors, counters = _split(self._optimizer.state.get(master, {}), master)
        views = {k: t.data.view(-1) for k, t in {WEIGHT: master, **tensors}.items()}
        return Share(name, 0, parameter.numel(), views, counters)

    def allocate(self, kinds: Mapping[str, Sequence[str]], counters: _Counters) -> None:
        for name, parameter in self._named.items():
            master = self._masters.get(parameter, parameter)
            _allocate(self._optimizer, master, [name], kinds, counters)

    def begin_load(self) -> None:
        """Nothing is gathered."""

    def finish_load(self) -> None:
        for parameter, master in self._masters.items():
            parameter.data.copy_(master.data)


def _split(state: Mapping[str, Any], flat: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """An optimizer's state of one tensor: tensors of its size, and plain numbers."""
    tensors, counters = {}, {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() == flat.numel() and value.dim():
            tensors[key] = value
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim()):
            counters[key] = float(value)
        elif value is not None:
            raise CheckpointError(
                f"the optimizer keeps {key!r} as {type(value).__name__}, which belongs to no "
                "element of a parameter and cannot be re-sharded; use Adam, AdamW, SGD or Lion"
            )
    return tensors, counters


def _allocate(
    owner: Any,
    flat: Tensor,
    members: Sequence[str],
    kinds: Mapping[str, Sequence[str]],
    counters: _Counters,
) -> None:
    wanted = {tuple(kinds[name]) for name in members}
    numbers = {tuple(sorted(counters[name].items())) for name in members}
    if len(wanted) > 1 or len(numbers) > 1:
        raise CheckpointError(
            f"the parameters {members[0]} ... {members[-1]} share an optimizer state here, but "
            f"were saved with different ones: {sorted(wanted)}, {sorted(numbers)}"
        )
    old = owner.state.pop(flat, {})
    state: dict[str, Any] = {
        key: _number(owner, flat, old.get(key), value) for key, value in next(iter(numbers))
    }
    for kind in next(iter(wanted)):
        kept = old.get(kind)
        state[kind] = torch.zeros_like(flat.data) if kept is None else kept
    if state:
        owner.state[flat] = state


def _number(owner: Any, flat: Tensor, old: Any, value: float) -> Any:
    """A counter in the form the optimizer keeps it in: torch's have tensors, DeepSpeed's ints."""
    if isinstance(old, Tensor):
        return torch.full_like(old, value)
    if type(owner).__module__.startswith("torch."):
        on_device = any(g.get("fused") or g.get("capturable") for g in owner.param_groups)
        return torch.tensor(value, dtype=torch.float32, device=flat.device if on_device else "cpu")
    return int(value) if value.is_integer() else value
