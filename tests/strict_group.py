"""A process group for tests that behaves as NCCL does where gloo is kinder, and costs less.

Ranks of one machine meet in shared memory. Every rank publishes what it starts on a communicator,
and tells from all these queues what has completed, by the rules of one stream per communicator:

* the operations of a rank run one after the other, sends and receives among them;
* a collective completes when it heads the queue of every member; members whose heads differ in
  kind, root, reduction, type or size are an error that names both;
* a send completes when it heads its queue and the matching receive heads the peer's: no buffers.
  With `lazy_pairs` the first one between two ranks also holds up both hosts until they have met.

What is read too early shows, too: outputs hold NaN until they are waited for, and an input that was
changed in flight is an error. It takes a fraction of gloo's CPU time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from strict_world import (
    FIELDS,
    MAX_GROUPS,
    SLOT_BYTES,
    SLOTS,
    StrictWorld,
    array_shapes,
    data_offset,
    region_bytes,
)
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["StrictGroup", "join"]

_BACKEND = "strict"
_NAP_S = 0.02  # between looks for what rings no bell
_COLLECTIVES = ("barrier", "broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_KINDS = (*_COLLECTIVES, "send", "receive")
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.int8,
)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "PRODUCT": torch.mul,
}
_REDUCTION_NAMES = tuple(_REDUCTIONS)


def join(world: StrictWorld) -> str:
    """Register the backend in this rank; the name that `init_process_group` and groups take."""
    memory = SharedMemory(world.memory_name)
    groups: list[StrictGroup] = []

    def create(options: Any, _: Any) -> StrictGroup:
        group = StrictGroup(options, world, memory, groups)
        groups.append(group)
        return group

    dist.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cpu"])
    return _BACKEND


class Read(Protocol):
    """Reads what a rank gave to an operation: its i-th tensor, shaped as the one that takes it."""

    def __call__(self, rank: int, like: Tensor, part: int = 0, /) -> Tensor: ...


@dataclass(eq=False)
class _Operation:
    """Something of this rank that may still be running."""

    name: str
    inputs: list[Tensor]
    finish: Callable[[Read], None]
    sent: list[Tensor] = field(default_factory=list)
    is_done: bool = False

    def check_inputs(self) -> None:
        """Raise a RuntimeError if one is not what it was when the operation started."""
        for given, sent in zip(self.inputs, self.sent, strict=True):
            if not torch.equal(_bits(given), _bits(sent)):
                raise RuntimeError(f"an input of {self.name} was changed in flight")


class _StrictWork(Work):
    def __init__(self, group: StrictGroup, operation: _Operation) -> None:
        super().__init__()
        self._group, self._operation = group, operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.wait_for(self._operation, timeout)
        return True

    def is_completed(self) -> bool:
        self._group.progress()
        return self._operation.is_done


class StrictGroup(dist.ProcessGroup):
    """One communicator; see the module."""

    def __init__(
        self, options: Any, world: StrictWorld, memory: SharedMemory, others: list[StrictGroup]
    ) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._me, self._size = options.group_rank, options.group_size
        self._members = list(options.global_ranks_in_group) or list(range(self._size))
        self._world, self._memory, self._others = world, memory, others
        self._timeout = options.timeout
        region = offset = self._agree_on_region(options) * region_bytes(len(world.bells))
        arrays = []
        for shape in array_shapes(self._size):
            arrays.append(np.ndarray(shape, np.int64, memory.buf, offset))
            offset += arrays[-1].nbytes
        self._posted, self._passed, self._taken, self._meetings = arrays[:4]
        self._queues, self._partners = arrays[4:]
        self._data = region + data_offset(self._size)
        self._running: deque[_Operation] = deque()
        self._met: set[tuple[int, int]] = set()

    def _agree_on_region(self, options: Any) -> int:
        if self._me == 0:
            is_first = not dist.is_initialized()
            number = 0 if is_first else _get_default_store().add("strict/groups", 1)
            if number >= MAX_GROUPS:
                raise RuntimeError(f"more than {MAX_GROUPS} groups")
            options.store.set("region", str(number))
        return int(options.store.get("region"))

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    # queues

    def _start(
        self,
        kind: str,
        note: Sequence[int],
        inputs: Sequence[Tensor],
        finish: Callable[[Read], None],
    ) -> _StrictWork:
        """Publish an operation; `note` is what the members' must have in common."""
        number = int(self._posted[self._me])
        self._wait_until(lambda: self._is_slot_free(number), f"a free slot for {kind}", None)
        given = [tensor.detach() for tensor in inputs]
        operation = _Operation(f"{kind} {tuple(note)}", given, finish)
        self._write(number, operation)
        entry = self._queues[self._me, number % SLOTS]
        entry[:] = (_KINDS.index(kind), *note, *(-1,) * (FIELDS - 1 - len(note)))
        self._running.append(operation)
        with self._locked():
            self._posted[self._me] = number + 1
            woken = self._complete_all()
        for rank in woken - {self._me}:
            self._world.bells[self._members[rank]].release()
        return _StrictWork(self, operation)

    def _is_slot_free(self, number: int) -> bool:
        """Everyone who took part in the operation that lay there has taken what it needs."""
        self.progress()
        if number < SLOTS:
            return True
        partners = self._partners[self._me, number % SLOTS]
        return bool(self._taken[self._me] > number - SLOTS and (self._taken > partners).all())

    def _write(self, number: int, operation: _Operation) -> None:
        offset = 0
        for tensor in operation.inputs:
            if offset + tensor.nbytes > SLOT_BYTES:
                raise RuntimeError(f"{operation.name}: more than {SLOT_BYTES} bytes at once")
            operation.sent.append(self._view(self._me, number, tensor, offset).copy_(tensor))
            offset += tensor.nbytes

    def _view(self, rank: int, number: int, like: Tensor, offset: int) -> Tensor:
        """Shared memory of a rank's operation, `offset` bytes behind its start."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        start = self._data + (rank * SLOTS + number % SLOTS) * SLOT_BYTES + offset
        flat = torch.frombuffer(
            self._memory.buf, dtype=like.dtype, count=like.numel(), offset=start
        )
        return flat.view(like.shape)

    def _reader(self, number: int) -> Read:
        """Reads for this rank's operation of a number what each partner gave to its own."""
        numbers = self._partners[self._me, number % SLOTS].tolist()

        def read(rank: int, like: Tensor, part: int = 0, /) -> Tensor:
            return self._view(rank, numbers[rank], like, part * like.nbytes)

        return read

    def _head(self, rank: int) -> tuple[int, ...] | None:
        """The oldest operation of a rank that has not completed."""
        if self._passed[rank] >= self._posted[rank]:
            return None
        return tuple(self._queues[rank, self._passed[rank] % SLOTS].tolist())

    def _complete_all(self) -> set[int]:
        """Complete whatever can be; the ranks that this lets go on."""
        woken: set[int] = set()
        while done := self._complete_one():
            woken.update(done)
        return woken

    def _complete_one(self) -> list[int]:
        heads = [self._head(rank) for rank in range(self._size)]
        for rank, head in enumerate(heads):
            if head is not None and _KINDS[head[0]] == "send":
                peer, wanted = head[1], (_KINDS.index("receive"), rank)
                other = heads[peer]
                if other is not None and other[:2] == wanted:
                    if head[2:] != other[2:]:
                        raise RuntimeError(self._mismatch({rank: head, peer: other}))
                    return self._pass_on(rank, peer)
        if any(h is None or _KINDS[h[0]] not in _COLLECTIVES for h in heads):
            return []
        found = {rank: head for rank, head in enumerate(heads) if head is not None}
        if len(set(found.values())) > 1:
            raise RuntimeError(self._mismatch(found))
        return self._pass_on(*found)

    def _mismatch(self, found: dict[int, tuple[int, ...]]) -> str:
        lines = (f"rank {self._members[r]}: {_describe(h)}" for r, h in found.items())
        return f"ranks {self._members} do not agree on their next operation: {'; '.join(lines)}"

    def _pass_on(self, *ranks: int) -> list[int]:
        for rank in ranks:
            partners = self._partners[rank, self._passed[rank] % SLOTS]
            partners[:] = -1
            partners[list(ranks)] = self._passed[list(ranks)]
        self._passed[list(ranks)] += 1
        return list(ranks)

    # waiting

    def progress(self) -> None:
        """Take what has completed."""
        while self._running and self._taken[self._me] < self._passed[self._me]:
            operation = self._running.popleft()
            operation.check_inputs()
            operation.finish(self._reader(int(self._taken[self._me])))
            operation.is_done = True
            self._taken[self._me] += 1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._world.lock.acquire(timeout=self._timeout.total_seconds()):
            raise RuntimeError("timed out: a rank ended while it held the lock")
        try:
            yield
        finally:
            self._world.lock.release()

    def wait_for(self, operation: _Operation, timeout: timedelta | None) -> None:
        """Until an operation of this rank has completed; a RuntimeError after the timeout."""

        def is_done() -> bool:
            self.progress()
            return operation.is_done

        self._wait_until(is_done, operation.name, timeout)

    def _wait_until(
        self, is_true: Callable[[], bool], what: str, timeout: timedelta | None
    ) -> None:
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        bell = self._world.bells[self._members[self._me]]
        while not is_true():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"timed out: {what} of rank {self._members[self._me]} among ranks "
                    f"{self._members}, which stand at {[self._head(r) for r in range(self._size)]}"
                )
            bell.acquire(True, _NAP_S)
            for group in self._others:  # so that nobody waits for a slot of ours meanwhile
                if group._running and group is not self:
                    group.progress()

    # operations, by the names that torch gives them from 2.11 on

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", (), (), lambda read: None)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        [tensor], root = tensors, opts.rootRank
        is_root = self._me == root

        def finish(read: Read) -> None:
            if not is_root:
                tensor.copy_(read(root, tensor))

        if not is_root:
            _poison(tensor)
        inputs = [tensor] if is_root else []
        return self._start("broadcast", (root, *_size_of(tensor)), inputs, finish)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        [tensor], name = tensors, opts.reduceOp.op.name
        note = (_REDUCTION_NAMES.index(name), *_size_of(tensor))

        def finish(read: Read) -> None:
            tensor.copy_(self._reduced(name, read, tensor))

        return self._start("all_reduce", note, [tensor], finish)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        [parts], [tensor] = outputs, inputs

        def finish(read: Read) -> None:
            for rank, part in enumerate(parts):
                part.copy_(read(rank, part))

        work = self._start("all_gather", _size_of(tensor), [tensor], finish)
        _poison(*(p for p in parts if not _overlap(p, tensor)))
        return work

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Work:
        return self.allgather([list(output.view(-1).chunk(self._size))], [tensor], opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        [output], [parts], name = outputs, inputs, opts.reduceOp.op.name
        note = (_REDUCTION_NAMES.index(name), *_size_of(output))

        def finish(read: Read) -> None:
            output.copy_(self._reduced(name, read, output, self._me))

        work = self._start("reduce_scatter", note, parts, finish)
        if not any(_overlap(output, part) for part in parts):
            _poison(output)
        return work

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Work:
        return self.reduce_scatter([output], [[tensor]], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        given, taken = (sum(t.numel() for t in tensors) for tensors in (inputs, outputs))
        if len({part.numel() for part in outputs}) != 1 or given != taken:
            raise RuntimeError("an all-to-all of parts that differ in size is not known here")

        def finish(read: Read) -> None:
            for rank, part in enumerate(outputs):
                part.copy_(read(rank, part, self._me))

        work = self._start("all_to_all", _size_of(outputs[0]), inputs, finish)
        _poison(*outputs)
        return work

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, out_sizes: Any, in_sizes: Any, opts: Any
    ) -> Work:
        return self.alltoall(list(output.view(-1).chunk(self._size)), [tensor], opts)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        [tensor] = tensors
        note = (peer, *_size_of(tensor), tag)
        return self._meet(self._start("send", note, [tensor], lambda read: None), self._me, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        [tensor] = tensors

        def finish(read: Read) -> None:
            tensor.copy_(read(peer, tensor))

        _poison(tensor)
        work = self._start("receive", (peer, *_size_of(tensor), tag), [], finish)
        return self._meet(work, peer, self._me)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _reduced(self, name: str, read: Read, like: Tensor, part: int = 0) -> Tensor:
        """The sum or the like of every member's part, in the order of ranks."""
        total = read(0, like, part).clone()
        for rank in range(1, self._size):
            total = _REDUCTIONS[name](total, read(rank, like, part))
        return total / self._size if name == "AVG" else total

    def _meet(self, work: Work, source: int, target: int) -> Work:
        """The first transfer of a pair, as NCCL connects it: the hosts wait for each other."""
        if not self._world.lazy_pairs or (source, target) in self._met:
            return work
        self._met.add((source, target))
        here = 0 if self._me == source else 1
        pair = self._meetings[source, target]
        pair[here] = 1
        self._wait_until(lambda: bool(pair.all()), f"connection of {source} to {target}", None)
        return work


def _size_of(tensor: Tensor) -> tuple[int, int]:
    return _DTYPES.index(tensor.dtype), tensor.numel()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_WORDS[tensor.itemsize])


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _poison(*outputs: Tensor) -> None:
    """Nothing sensible stands in an output before it is waited for."""
    for tensor in outputs:
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))


def _describe(head: tuple[int, ...]) -> str:
    return f"{_KINDS[head[0]]} {head[1:]}"
