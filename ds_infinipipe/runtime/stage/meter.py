"""Live tensor bytes of this rank, by what they are for: the truth behind the memory model.

On the CPU a dispatch mode sees every tensor that an operator returns, counts its storage once, and
a finalizer on the storage takes it off again. What a kernel allocates and frees inside itself is
not seen. On CUDA the allocator counts, without kinds. Nothing is hooked while no meter is on.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_infinipipe.model.context import ChunkContext
from ds_infinipipe.ops.cross_entropy import linear_cross_entropy_sum
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.runtime.shards.sharding import ReplicatedSharding
from ds_infinipipe.runtime.shards.zero3 import Zero3Sharding
from ds_infinipipe.runtime.stage.channels import Channel
from ds_infinipipe.runtime.stage.executor import StageExecutor

__all__ = ["MemoryMeter", "MemoryUse", "StorageKind", "live_tensor_bytes"]


class StorageKind(str, Enum):
    """What a storage was made for, told from the function that made it."""

    STATES = "states"
    """What was there when the meter was turned on."""
    GATHERED = "gathered parameters"
    ACTIVATIONS = "activations"
    ARENA = "K/V arena"
    KV_GRADIENTS = "dK/dV"
    LOSS = "loss block"
    BACKWARD = "gradients in backward"
    REDUCTION = "gradient reduction"
    TRANSFER = "receive buffers"
    OTHER = "other"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes at the peak of a metered stretch; `by_kind` is empty on CUDA."""

    start_bytes: int
    peak_bytes: int
    by_kind: dict[StorageKind, int] = field(default_factory=dict)

    @property
    def dynamic_bytes(self) -> int:
        """What the stretch needed on top of what was there before it."""
        return self.peak_bytes - self.start_bytes


_MAKERS: dict[CodeType, StorageKind] = {
    SequenceArena.write.__code__: StorageKind.ARENA,
    SequenceArena.collect_grads.__code__: StorageKind.KV_GRADIENTS,
    Channel._post.__code__: StorageKind.TRANSFER,
    Zero3Sharding._gather.__code__: StorageKind.GATHERED,
    Zero3Sharding.fetch.__code__: StorageKind.GATHERED,
    Zero3Sharding.reduce.__code__: StorageKind.REDUCTION,
    Zero3Sharding.flush.__code__: StorageKind.REDUCTION,
    ReplicatedSharding._gradients_of.__code__: StorageKind.REDUCTION,
    linear_cross_entropy_sum.__code__: StorageKind.LOSS,
    StageExecutor._head.__code__: StorageKind.LOSS,
    StageExecutor._recompute.__code__: StorageKind.ACTIVATIONS,
    StageExecutor.forward.__code__: StorageKind.ACTIVATIONS,
    ChunkContext.from_chunk.__func__.__code__: StorageKind.ACTIVATIONS,  # type: ignore[attr-defined]
    StageExecutor.backward.__code__: StorageKind.BACKWARD,
    StageExecutor.backward_input.__code__: StorageKind.BACKWARD,
    StageExecutor.backward_weight.__code__: StorageKind.BACKWARD,
}


class MemoryMeter(TorchDispatchMode):
    """Counts while it is on: `with MemoryMeter(device, hooks) as meter: engine.train_plan(...)`.

    `hooks` are functions that are called when a step's gradients are complete, an engine's
    `before_step_hooks`. With them `use` is the peak up to there: the optimizer step is DeepSpeed's
    and comes when no activation is alive. Without, it is the peak of the whole stretch. The count
    starts from all tensors alive when the meter is turned on. `device` None is the CPU.
    """

    def __init__(
        self, device: torch.device | None = None, hooks: list[Callable[[Any], None]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hooks = [] if hooks is None else hooks
        self._is_cuda = device is not None and device.type == "cuda"
        self._frozen: MemoryUse | None = None
        self._live: Counter[StorageKind] = Counter()
        self._known: dict[int, int] = {}
        self._current = self._start = self._peak = 0
        self._at_peak: dict[StorageKind, int] = {}

    @property
    def use(self) -> MemoryUse:
        """The peak so far, or that of the pipeline once the step has reached its end."""
        if self._frozen is not None:
            return self._frozen
        if self._is_cuda:
            return MemoryUse(self._start, torch.cuda.max_memory_allocated())
        return MemoryUse(self._start, self._peak, dict(self._at_peak))

    def __enter__(self) -> MemoryMeter:
        self._hooks.append(self._freeze)
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            return self
        for tensor in _live_tensors():
            self._register(tensor, StorageKind.STATES)
        self._start = self._current
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._is_cuda:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.remove(self._freeze)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _has_memory(leaf) and leaf.untyped_storage()._cdata not in self._known:
                self._register(leaf, _kind_of_caller())
        return result

    def _freeze(self, _: Any) -> None:
        self._frozen = self.use

    def _register(self, tensor: Tensor, kind: StorageKind) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = size
        weakref.finalize(storage, self._forget, key, kind, size).atexit = False
        self._live[kind] += size
        self._current += size
        if self._current > self._peak:
            self._peak = self._current
            self._at_peak = dict(self._live)

    def _forget(self, key: int, kind: StorageKind, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self._live[kind] -= size
            self._current -= size


def _kind_of_caller() -> StorageKind:
    frame = sys._getframe(2)
    while frame is not None:
        kind = _MAKERS.get(frame.f_code)
        if kind is not None:
            return kind
        frame = frame.f_back  # type: ignore[assignment]
    return StorageKind.OTHER


def live_tensor_bytes() -> int:
    """Bytes of all tensors that Python can reach now, each storage counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _live_tensors()}
    return sum(storages.values())


def _live_tensors() -> list[Tensor]:
    gc.collect()
    return [o for o in gc.get_objects() if _has_memory(o)]


def _has_memory(value: Any) -> bool:
    """False for all but tensors, and for those that torch.compile traces with: they may live on."""
    if not issubclass(type(value), Tensor):
        return False
    is_traced = issubclass(type(value), (FakeTensor, FunctionalTensor))
    if is_traced or torch._is_functional_tensor(value):
        return False
    return bool(value.layout is torch.strided and value.device.type != "meta")
