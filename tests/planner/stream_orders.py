"""Instruction streams in orders of many kinds, for tests of transfers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ds_infinipipe.planner.facts.setup import Layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.order import split_backwards
from ds_infinipipe.planner.plan.plan import PipelinePlan
from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.planner.search.lean.stream import build_stream

__all__ = ["lean_streams", "posted_ahead"]

Streams = tuple[tuple[Instruction, ...], ...]
_RECEIVES = (Op.RECV_ACTIVATION, Op.RECV_GRADIENT)
_SENDS = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
_GROWTHS = (0.3, 0.5, 1.0, 2.0, 100.0)


def lean_streams(rng: np.random.Generator) -> Streams:
    """Of 1 to 16 stages, long sequences in up to 40 slices, and windows that shrink in any way.

    In half of them backwards are split at random. Fewer chunks than stages are among them.
    """
    pp = int(rng.integers(1, 17))
    most = int(rng.choice([2, 3, 6, 20, 40]))
    blocks = sorted(rng.integers(1, most, int(rng.integers(0, 6))).tolist(), reverse=True)
    blocks += [1] * int(rng.integers(0 if blocks else 1, 30))
    packed: Any = SimpleNamespace(
        num_chunks=sum(blocks),
        slices=np.repeat(blocks, blocks).astype(np.int64),
        sequence=np.repeat(np.arange(len(blocks)), blocks),
        start=np.concatenate([np.arange(n) for n in blocks]),
    )
    schedule = build_stream(packed, pp, float(rng.choice(_GROWTHS)), int(rng.integers(0, 2)))
    operations = [list(row) for row in schedule.as_operations()]
    if rng.random() < 0.5:
        operations = [
            list(split_backwards(row, _delays(rng, packed.num_chunks))) for row in operations
        ]
    layout = Layout(pp=pp, sp=1, dp=1, stage_layers=(1,) * pp)
    chunks = [Chunk((Slice(n, 0, 1, True),), 0) for n in range(packed.num_chunks)]
    forward = tuple(schedule.forward.tolist())
    recompute = ((0,) * len(chunks),) * pp
    pipeline = PipelinePlan(forward, tuple(schedule.backward.tolist()), recompute, max(blocks))
    return lower_plan([pipeline], chunks, layout, operations)


def _delays(rng: np.random.Generator, chunks: int) -> dict[int, int]:
    share, longest = rng.random(), int(rng.choice([1, 3, 10]))
    chosen = np.flatnonzero(rng.random(chunks) < share)
    return {int(chunk): int(rng.integers(0, longest + 1)) for chunk in chosen}


def posted_ahead(streams: Sequence[Sequence[Instruction]]) -> Streams:
    """Each receive one operation before the one that takes it, as earlier versions had them."""
    return tuple(_ahead(stream) for stream in streams)


def _ahead(stream: Sequence[Instruction]) -> tuple[Instruction, ...]:
    result: list[Instruction] = []
    receives = [i for i in stream if i.op in _RECEIVES]
    rest = [i for i in stream if i.op not in _RECEIVES]
    fed = [n for n, i in enumerate(rest) if i.op is Op.FORWARD or i.op.makes_gradient]
    takers = {n: _receive_of(rest[n]) for n in fed}
    places: dict[int, list[Instruction]] = {}
    for before, n in zip([fed[0], *fed], fed, strict=False):
        if takers[n] in receives:
            places.setdefault(before, []).append(takers[n])
    for n, instruction in enumerate(rest):
        result += places.get(n, [])
        result.append(instruction)
    return tuple(result)


def _receive_of(operation: Instruction) -> Instruction:
    op = Op.RECV_ACTIVATION if operation.op is Op.FORWARD else Op.RECV_GRADIENT
    return Instruction(op, operation.chunk)
