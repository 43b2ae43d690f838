"""Plans put together by hand or at random, without the planner's own code except lowering."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
from oracles.simulate import simulate

from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import Execution, Layout, Setup, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.plan import PipelinePlan, Plan, Prediction, SolverStats
from ds_infinipipe.planner.plan.stream import Op, Timeline
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.planner.verify.frame import peak_bytes_by_stage

Operations = tuple[tuple[tuple[Op, int], ...], ...]


def tiny_model(num_layers: int) -> ModelSpec:
    return ModelSpec("tiny", num_layers, 32, 48, 4, 4, 8, 50)


def whole(sequence: int, length: int) -> Slice:
    return Slice(sequence, 0, length, True)


def packed(sp: int, *slices: Slice) -> Chunk:
    return Chunk(slices, -sum(s.length for s in slices) % sp)


def backward_of(chunks: Sequence[Chunk], forward: Sequence[int]) -> tuple[int, ...]:
    """Forward order with every run of slices of one sequence reversed."""
    order: list[int] = []
    block: list[int] = []
    for chunk in forward:
        head = chunks[chunk].slices[0]
        if head.start == 0:
            order += reversed(block)
            block = []
        block.append(chunk)
    return tuple(order + block[::-1])


def pipeline_of(
    chunks: Sequence[Chunk],
    forward: Sequence[int],
    layout: Layout,
    recompute: Callable[[int, int], int],
) -> PipelinePlan:
    counts: dict[int, int] = {}
    for chunk in forward:
        if chunks[chunk].keeps_kv:
            sequence = chunks[chunk].slices[0].sequence
            counts[sequence] = counts.get(sequence, 0) + 1
    table = tuple(tuple(recompute(p, c) for c in forward) for p in range(layout.pp))
    backward = backward_of(chunks, forward)
    return PipelinePlan(tuple(forward), backward, table, max(counts.values(), default=1))


def operations_of(pipelines: Sequence[PipelinePlan], pp: int) -> Operations:
    """1F1B with the window of Eq. 7, pipeline after pipeline."""
    stages = []
    for stage in range(pp):
        operations: list[tuple[Op, int]] = []
        for pipeline in pipelines:
            window, done = pp - 1 - stage + pipeline.num_split, 0
            for position, chunk in enumerate(pipeline.backward):
                ahead = pipeline.forward[done : position + window]
                operations += [(Op.FORWARD, c) for c in ahead]
                done += len(ahead)
                operations.append((Op.BACKWARD, chunk))
        stages.append(tuple(operations))
    return tuple(stages)


def split_operations(operations: Operations, delay: Callable[[int, int], int | None]) -> Operations:
    """Backwards as I and W, `delay(stage, chunk)` operations apart; whole where it is None.

    W's stand as far behind as there are operations, in any order among themselves.
    """
    stages = []
    for stage, row in enumerate(operations):
        split = [
            (i, (Op.BACKWARD_INPUT, c), delay(stage, c))
            if op is Op.BACKWARD and delay(stage, c) is not None
            else (i, (op, c), None)
            for i, (op, c) in enumerate(row)
        ]
        weights = [(i + d + 0.5, (Op.BACKWARD_WEIGHT, o[1])) for i, o, d in split if d is not None]
        merged = sorted([*((float(i), o) for i, o, _ in split), *weights], key=lambda item: item[0])
        stages.append(tuple(o for _, o in merged))
    return tuple(stages)


def unit_timeline(plan: Plan) -> Timeline:
    """One second F, I and W, two B, half a recomputed layer, nothing a transfer."""
    n = len(plan.chunks)
    return simulate(
        plan.streams,
        forward_s=np.full((plan.layout.pp, n), 1.0),
        backward_s=np.full((plan.layout.pp, n), 2.0),
        recompute_s=np.full(n, 0.5),
        p2p_s=np.zeros(n),
        input_s=np.ones((plan.layout.pp, n)),
        weight_s=np.ones((plan.layout.pp, n)),
    )


def make_plan(
    lengths: Sequence[int],
    chunks: Sequence[Chunk],
    forwards: Sequence[Sequence[int]],
    *,
    pp: int,
    sp: int = 1,
    layers_per_stage: int = 2,
    alignment: int = 1,
    recompute: Callable[[int, int], int] = lambda stage, chunk: 0,
    delay: Callable[[int, int], int | None] = lambda stage, chunk: None,
) -> Plan:
    """A plan of these chunks, one pipeline per entry of `forwards` (chunk ids in order)."""
    model = tiny_model(layers_per_stage * pp)
    layout = make_layout(model, pp, sp)
    pipelines = tuple(pipeline_of(chunks, forward, layout, recompute) for forward in forwards)
    operations = split_operations(operations_of(pipelines, pp), delay)
    plan = Plan(
        setup=Setup(
            model,
            BUILTIN_CLUSTERS["cpu-local"],
            layout,
            Execution(dtype_bytes=4),
            limit_bytes=2**40,
            alignment=alignment,
        ),
        lengths=tuple(lengths),
        chunks=tuple(chunks),
        pipelines=pipelines,
        streams=lower_plan(pipelines, chunks, layout, operations),
        predicted=Prediction(0.0, 0.0, (0,) * pp),
        solver=SolverStats("paper", 2, "optimal", 0.0, 0.01),
    )
    return with_prediction(plan)


def with_setup(plan: Plan, **changes: Any) -> Plan:
    """The plan for another setup; `changes` name fields of it or of its execution."""
    names = {field.name for field in fields(Setup)}
    setup = replace(plan.setup, **{k: v for k, v in changes.items() if k in names})
    rest = {k: v for k, v in changes.items() if k not in names}
    return replace(plan, setup=setup.run_with(**rest))


def with_prediction(plan: Plan) -> Plan:
    timeline = forecast(plan)
    peaks = peak_bytes_by_stage(plan)
    predicted = Prediction(timeline.makespan_s, timeline.bubble_ratio, peaks)
    return with_setup(replace(plan, predicted=predicted), limit_bytes=max(peaks))


def rich_plan() -> Plan:
    """Three stages, sp 2, two pipelines; split, hybrid and batched chunks; recompute; I and W.

    Sequence 0: slices of 8, 8, 4 (shorts beside the second and the tail); sequence 1: 4 and 5;
    sequence 2 of 6 and 3 tokens of 7 whole, 4 + 5 packed; 6 alone.
    """
    lengths = (20, 9, 6, 7, 3, 5, 11)
    chunks = (
        packed(2, Slice(0, 0, 8, False)),
        packed(2, Slice(0, 8, 8, False), whole(2, 6)),
        packed(2, Slice(0, 16, 4, True), whole(3, 7)),
        packed(2, whole(4, 3), whole(5, 5)),
        packed(2, Slice(1, 0, 4, False)),
        packed(2, Slice(1, 4, 5, True)),
        packed(2, whole(6, 11)),
    )
    return make_plan(
        lengths,
        chunks,
        [(0, 1, 2, 3), (4, 5, 6)],
        pp=3,
        sp=2,
        layers_per_stage=4,
        alignment=4,
        recompute=lambda stage, chunk: (chunk + 2 * stage) % 5,
        delay=lambda stage, chunk: chunk if (chunk + stage) % 3 else None,
    )


def random_plan(seed: int, max_sequences: int = 9) -> Plan:
    """Any valid plan: odd lengths, any slice with shorts beside it, one to three pipelines."""
    rng = random.Random(seed)
    pp, sp, alignment = rng.randint(1, 5), rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    unit, layers = lcm(sp, alignment), rng.randint(1, 3)
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, max_sequences))]
    blocks, shorts = _cut_some(lengths, unit, rng)
    for sequence in shorts:
        host = rng.choice(rng.choice(blocks)) if blocks and rng.random() < 0.7 else None
        if host is None:
            blocks.append([[whole(sequence, lengths[sequence])]])
        else:
            host.append(whole(sequence, lengths[sequence]))
    chunks: list[Chunk] = []
    members: list[list[int]] = []
    for block in blocks:
        members.append(list(range(len(chunks), len(chunks) + len(block))))
        chunks += [packed(sp, *slices) for slices in block]
    rng.shuffle(members)
    num_pipelines = rng.randint(1, min(3, len(members)))
    bounds = [0, *sorted(rng.sample(range(1, len(members)), num_pipelines - 1)), len(members)]
    forwards = [[c for block in members[a:b] for c in block] for a, b in pairwise(bounds)]
    table = [[rng.randint(0, layers) for _ in chunks] for _ in range(pp)]
    share = rng.choice([0.0, 0.4, 1.0])
    delays = [
        [rng.choice([0, 1, 3, 99]) if rng.random() < share else None for _ in chunks]
        for _ in range(pp)
    ]
    return make_plan(
        lengths,
        chunks,
        forwards,
        pp=pp,
        sp=sp,
        layers_per_stage=layers,
        alignment=alignment,
        recompute=lambda stage, chunk: table[stage][chunk],
        delay=lambda stage, chunk: delays[stage][chunk],
    )


def _cut_some(
    lengths: Sequence[int], unit: int, rng: random.Random
) -> tuple[list[list[list[Slice]]], list[int]]:
    """Blocks of chunks (each a list of slices) of the cut sequences, and the uncut ones."""
    blocks: list[list[list[Slice]]] = []
    shorts: list[int] = []
    for sequence, length in enumerate(lengths):
        places = range(unit, length, unit)
        count = rng.randint(0, min(4, len(places)))
        if not count:
            shorts.append(sequence)
            continue
        bounds = [0, *sorted(rng.sample(places, count)), length]
        pairs = pairwise(bounds)
        blocks.append([[Slice(sequence, a, b - a, b == length)] for a, b in pairs])
    return blocks, shorts
