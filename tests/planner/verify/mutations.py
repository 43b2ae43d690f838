"""What the ways to break a valid plan share, and their register.

Each takes a plan and a random source and returns a broken plan, or None where the plan has nothing
of that kind to break.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.plan import PipelinePlan, Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op

Mutation = Callable[[Plan, random.Random], Plan | None]

MUTATIONS: dict[str, tuple[Mutation, str]] = {}
"""Name -> (mutation, pattern of the verifier's message on the hand-made plan)."""


def mutation(pattern: str) -> Callable[[Mutation], Mutation]:
    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = (function, pattern)
        return function

    return register


def with_chunk(plan: Plan, chunk_id: int, chunk: Chunk) -> Plan:
    chunks = list(plan.chunks)
    chunks[chunk_id] = chunk
    return replace(plan, chunks=tuple(chunks))


def repacked(plan: Plan, chunk_id: int, slices: Sequence[Slice]) -> Plan:
    """The chunk with other slices and the padding that these need."""
    padding = -sum(s.length for s in slices) % plan.layout.sp
    return with_chunk(plan, chunk_id, Chunk(tuple(slices), padding))


def with_stream(plan: Plan, stage: int, stream: Sequence[Instruction]) -> Plan:
    streams = list(plan.streams)
    streams[stage] = tuple(stream)
    return replace(plan, streams=tuple(streams))


def with_pipeline(plan: Plan, number: int, pipeline: PipelinePlan) -> Plan:
    pipelines = list(plan.pipelines)
    pipelines[number] = pipeline
    return replace(plan, pipelines=tuple(pipelines))


def cut_chunks(plan: Plan) -> list[int]:
    return [c for c, chunk in enumerate(plan.chunks) if chunk.keeps_kv]


def slice_pairs(plan: Plan) -> list[tuple[int, int]]:
    """Chunks of successive slices of one sequence."""
    ends = {(c.slices[0].sequence, c.slices[0].end): i for i, c in enumerate(plan.chunks)}
    return [
        (ends[c.slices[0].sequence, c.slices[0].start], i)
        for i, c in enumerate(plan.chunks)
        if c.keeps_kv and c.slices[0].start > 0
    ]


def find_places(plan: Plan, *ops: Op) -> list[tuple[int, int]]:
    """(stage, index) of every instruction of these kinds."""
    return [
        (stage, index)
        for stage, stream in enumerate(plan.streams)
        for index, instruction in enumerate(stream)
        if instruction.op in ops
    ]


def drop(plan: Plan, rng: random.Random, op: Op) -> Plan | None:
    places = find_places(plan, op)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = plan.streams[stage]
    return with_stream(plan, stage, stream[:index] + stream[index + 1 :])


def repeat(plan: Plan, rng: random.Random, op: Op) -> Plan | None:
    places = find_places(plan, op)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = plan.streams[stage]
    return with_stream(plan, stage, (*stream[: index + 1], stream[index], *stream[index + 1 :]))


def swap(plan: Plan, stage: int, first: Instruction, second: Instruction) -> Plan:
    exchange = {first: second, second: first}
    return with_stream(plan, stage, [exchange.get(i, i) for i in plan.streams[stage]])


def find(plan: Plan, stage: int, op: Op, chunk: int) -> Instruction:
    """The instruction; of a backward that is split in two, its first half."""
    ops = (op, Op.BACKWARD_INPUT) if op is Op.BACKWARD else (op,)
    return next(i for i in plan.streams[stage] if i.op in ops and i.chunk == chunk)


def moved(stream: Sequence[Instruction], source: int, target: int) -> list[Instruction]:
    """The stream with instruction `source` moved to stand before instruction `target`."""
    rest = [i for index, i in enumerate(stream) if index != source]
    rest.insert(target - (source < target), stream[source])
    return rest
