"""Random valid plans: what the executor must get exactly right, however odd it looks.

The planner makes sensible plans; these are drawn from everything the verifier allows: any cut, any
packing beside any slice, any number of pipelines, any recompute count and any split of a backward
per stage and chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ds_infinipipe.planner.facts.setup import Layout, Setup
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.order import backward_order, count_slices, split_backwards
from ds_infinipipe.planner.plan.plan import PipelinePlan, Plan, Prediction, SolverStats
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.planner.predict.ledger import plan_peaks
from ds_infinipipe.planner.predict.schedule import pipeline_schedule
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.planner.verify.frame import verify_plan

__all__ = ["random_plan", "with_prediction"]

_UNLIMITED_BYTES = 2**60
_MOST_SLICES = 5
_MOST_PIPELINES = 3


def random_plan(
    lengths: Sequence[int],
    rng: np.random.Generator,
    setup: Setup,
    *,
    may_split: bool = True,
) -> Plan:
    """A verified plan of `lengths` drawn with `rng`; the setup's memory limit does not count.

    With `may_split` some backwards are in two halves, which only our own projections can.
    """
    layout = setup.layout
    chunks, blocks = _random_chunks(lengths, setup.unit, layout.sp, rng)
    pipelines = tuple(
        _random_pipeline(chunks, group, layout, rng) for group in _random_groups(blocks, rng)
    )
    operations = pipeline_schedule(pipelines, layout.pp).as_operations()
    if may_split:
        operations = _with_random_splits(operations, rng)
    keeps_gathered = setup.gathers_parameters and rng.random() < 0.5
    drawn = replace(setup, limit_bytes=_UNLIMITED_BYTES).run_with(keeps_gathered=keeps_gathered)
    draft = Plan(
        setup=drawn,
        lengths=tuple(lengths),
        chunks=chunks,
        pipelines=pipelines,
        streams=lower_plan(pipelines, chunks, layout, operations),
        predicted=Prediction(0.0, 0.0, (0,) * layout.pp),
        solver=SolverStats("random", 0, "feasible", 0.0, 0.0),
    )
    plan = with_prediction(draft)
    verify_plan(plan)
    return plan


def _with_random_splits(
    operations: Sequence[Sequence[tuple[Op, int]]], rng: np.random.Generator
) -> tuple[tuple[tuple[Op, int], ...], ...]:
    """No, some or all backwards of a stage split; each W soon, or all of them at the very end."""
    stages = []
    for stage in operations:
        share = float(rng.choice([0.0, 0.5, 1.0]))
        most = int(rng.choice([1, 4, len(stage)]))
        delays = {
            chunk: len(stage) if most == len(stage) else int(rng.integers(0, most))
            for op, chunk in stage
            if op is Op.BACKWARD and rng.random() < share
        }
        stages.append(split_backwards(stage, delays))
    return tuple(stages)


def with_prediction(plan: Plan) -> Plan:
    """The plan with what the simulator and the memory model say about its streams."""
    timeline = forecast(plan)
    predicted = Prediction(timeline.makespan_s, timeline.bubble_ratio, plan_peaks(plan))
    return replace(plan, predicted=predicted)


def _random_chunks(
    lengths: Sequence[int], unit: int, sp: int, rng: np.random.Generator
) -> tuple[tuple[Chunk, ...], list[list[int]]]:
    """Chunks, and the blocks that must stay together: a cut sequence's chunks, or one chunk."""
    contents: list[list[Slice]] = []
    blocks: list[list[int]] = []
    shorts: list[Slice] = []
    for sequence, length in enumerate(lengths):
        pieces = _random_cut(sequence, length, unit, rng)
        if len(pieces) == 1:
            shorts += pieces
            continue
        blocks.append(list(range(len(contents), len(contents) + len(pieces))))
        contents += [[piece] for piece in pieces]
    for short in shorts:
        place = int(rng.integers(0, len(contents) + 1))
        if place == len(contents):
            blocks.append([place])
            contents.append([])
        contents[place].append(short)
    chunks = tuple(Chunk(tuple(c), padding=-sum(s.length for s in c) % sp) for c in contents)
    return chunks, blocks


def _random_cut(sequence: int, length: int, unit: int, rng: np.random.Generator) -> list[Slice]:
    places = np.arange(unit, length, unit)
    if not len(places) or rng.random() < 0.4:
        return [Slice(sequence, 0, length, True)]
    count = int(rng.integers(1, min(_MOST_SLICES - 1, len(places)) + 1))
    cuts = sorted(rng.choice(places, size=count, replace=False).tolist())
    bounds = [0, *cuts, length]
    return [
        Slice(sequence, start, end - start, end == length)
        for start, end in itertools.pairwise(bounds)
    ]


def _random_groups(blocks: list[list[int]], rng: np.random.Generator) -> list[list[list[int]]]:
    count = int(rng.integers(1, min(_MOST_PIPELINES, len(blocks)) + 1))
    order = rng.permutation(len(blocks)).tolist()
    groups: list[list[list[int]]] = [[] for _ in range(count)]
    for position, block in enumerate(order):
        # the first `count` blocks fill one group each, so that none is empty
        group = position if position < count else int(rng.integers(0, count))
        groups[group].append(blocks[block])
    return groups


def _random_pipeline(
    chunks: Sequence[Chunk], blocks: list[list[int]], layout: Layout, rng: np.random.Generator
) -> PipelinePlan:
    forward = tuple(chunk for block in blocks for chunk in block)
    recompute = tuple(
        tuple(rng.integers(0, layers + 1, size=len(forward)).tolist())
        for layers in layout.stage_layers
    )
    backward = backward_order(chunks, forward)
    return PipelinePlan(forward, backward, recompute, count_slices(chunks, forward))
