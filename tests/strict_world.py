"""What the ranks of `strict_group` share, made by the process that starts them. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from multiprocessing.shared_memory import SharedMemory
from typing import Any

__all__ = [
    "FIELDS",
    "MAX_GROUPS",
    "SLOTS",
    "SLOT_BYTES",
    "StrictWorld",
    "array_shapes",
    "data_offset",
    "open_world",
    "region_bytes",
]

SLOTS = 16  # operations of a rank in flight on one communicator
SLOT_BYTES = 1 << 22  # of shared memory that is only there once it is written
FIELDS = 6  # numbers that describe an operation
MAX_GROUPS = 512
_PAGE = 1 << 12


@dataclass(frozen=True)
class StrictWorld:
    """Shared memory by name, a semaphore for each rank that wakes it, and a lock for all."""

    memory_name: str
    bells: tuple[Any, ...]
    lock: Any
    lazy_pairs: bool


@contextmanager
def open_world(context: Any, world_size: int, backend: str) -> Iterator[StrictWorld | None]:
    """What ranks of a backend, "gloo", "strict" or "lazy", share while the block runs."""
    if backend == "gloo":
        yield None
        return
    memory = SharedMemory(create=True, size=MAX_GROUPS * region_bytes(world_size))
    try:
        bells = tuple(context.Semaphore(0) for _ in range(world_size))
        yield StrictWorld(memory.name, bells, context.Lock(), lazy_pairs=backend == "lazy")
    finally:
        memory.close()
        memory.unlink()


def array_shapes(size: int) -> list[tuple[int, ...]]:
    """Of the numbers that `size` members share, as they lie one behind the other.

    By rank: operations published, completed, and whose outputs have been taken; by sender and
    receiver: which of the two has come to their first transfer; by rank and slot: the operation,
    and the number that each partner gives it.
    """
    counts = (size,)
    return [counts, counts, counts, (size, size, 2), (size, SLOTS, FIELDS), (size, SLOTS, size)]


def data_offset(size: int) -> int:
    """Where the slots begin, member by member, behind the numbers of eight bytes each."""
    header = sum(8 * prod(shape) for shape in array_shapes(size))
    return -(-header // _PAGE) * _PAGE


def region_bytes(size: int) -> int:
    """Of a communicator with `size` members."""
    return data_offset(size) + size * SLOTS * SLOT_BYTES
