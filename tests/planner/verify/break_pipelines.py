"""Plans whose pipelines contradict themselves."""

from __future__ import annotations

import random
from dataclasses import replace

from mutations import mutation, slice_pairs, with_pipeline, with_stream

from ds_infinipipe.planner.plan.plan import PipelinePlan, Plan
from ds_infinipipe.planner.plan.stream import Op


def _without(pipeline: PipelinePlan, chunk: int) -> PipelinePlan:
    at = pipeline.forward.index(chunk)
    return replace(
        pipeline,
        forward=pipeline.forward[:at] + pipeline.forward[at + 1 :],
        backward=tuple(c for c in pipeline.backward if c != chunk),
        recompute=tuple(row[:at] + row[at + 1 :] for row in pipeline.recompute),
    )


def _with_member(pipeline: PipelinePlan, chunk: int) -> PipelinePlan:
    return replace(
        pipeline,
        forward=(*pipeline.forward, chunk),
        backward=(*pipeline.backward, chunk),
        recompute=tuple((*row, 0) for row in pipeline.recompute),
    )


@mutation("in no pipeline|lacks|is empty")
def a_chunk_is_in_no_pipeline(plan: Plan, rng: random.Random) -> Plan | None:
    number = rng.randrange(len(plan.pipelines))
    pipeline = plan.pipelines[number]
    return with_pipeline(plan, number, _without(pipeline, rng.choice(pipeline.forward)))


@mutation("planned twice")
def a_chunk_is_in_a_pipeline_twice(plan: Plan, rng: random.Random) -> Plan | None:
    number = rng.randrange(len(plan.pipelines))
    pipeline = _with_member(plan.pipelines[number], rng.randrange(len(plan.chunks)))
    return with_pipeline(plan, number, pipeline)


@mutation("names chunk")
def a_pipeline_names_a_chunk_that_does_not_exist(plan: Plan, rng: random.Random) -> Plan | None:
    number = rng.randrange(len(plan.pipelines))
    pipeline = _with_member(plan.pipelines[number], rng.choice([-1, len(plan.chunks)]))
    return with_pipeline(plan, number, pipeline)


@mutation("is empty")
def a_pipeline_is_empty(plan: Plan, rng: random.Random) -> Plan | None:
    empty = PipelinePlan((), (), ((),) * plan.layout.pp, 1)
    return replace(plan, pipelines=(*plan.pipelines, empty))


@mutation("is spread over pipelines")
def a_sequence_is_spread_over_pipelines(plan: Plan, rng: random.Random) -> Plan | None:
    if not slice_pairs(plan):
        return None
    chunk = rng.choice(slice_pairs(plan))[1]
    number = next(n for n, p in enumerate(plan.pipelines) if chunk in p.forward)
    pipelines = list(plan.pipelines)
    pipelines[number] = _without(pipelines[number], chunk)
    alone = PipelinePlan((chunk,), (chunk,), ((0,),) * plan.layout.pp, 1)
    return replace(plan, pipelines=(*pipelines, alone))


def _swap_in_order(plan: Plan, rng: random.Random, name: str) -> Plan | None:
    if not slice_pairs(plan):
        return None
    exchange = dict(rng.choice([(p, p[::-1]) for p in slice_pairs(plan)]))
    number = next(n for n, p in enumerate(plan.pipelines) if next(iter(exchange)) in p.forward)
    pipeline = plan.pipelines[number]
    order = tuple(exchange.get(c, c) for c in getattr(pipeline, name))
    return with_pipeline(plan, number, replace(pipeline, **{name: order}))


@mutation("holds the earlier slice")
def the_forward_order_breaks_the_slice_order(plan: Plan, rng: random.Random) -> Plan | None:
    return _swap_in_order(plan, rng, "forward")


@mutation("holds the next slice")
def the_backward_order_is_not_reversed(plan: Plan, rng: random.Random) -> Plan | None:
    return _swap_in_order(plan, rng, "backward")


@mutation("must hold the same chunks")
def forward_and_backward_hold_different_chunks(plan: Plan, rng: random.Random) -> Plan | None:
    number = rng.randrange(len(plan.pipelines))
    pipeline = plan.pipelines[number]
    short = replace(pipeline, backward=pipeline.backward[:-1])
    return with_pipeline(plan, number, short)


@mutation("states num_split")
def num_split_is_wrong(plan: Plan, rng: random.Random) -> Plan | None:
    number = rng.randrange(len(plan.pipelines))
    pipeline = plan.pipelines[number]
    wrong = replace(pipeline, num_split=pipeline.num_split + rng.choice([-1, 1]))
    return with_pipeline(plan, number, wrong)


def _with_recompute(plan: Plan, rng: random.Random, stage: int, count: int) -> Plan:
    """The table entry and the instructions of one chunk changed alike, so only the range is bad."""
    number = rng.randrange(len(plan.pipelines))
    pipeline = plan.pipelines[number]
    at = rng.randrange(len(pipeline.forward))
    table = [list(row) for row in pipeline.recompute]
    table[stage][at] = count
    compute = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)
    stream = [
        replace(i, recompute=count) if i.op in compute and i.chunk == pipeline.forward[at] else i
        for i in plan.streams[stage]
    ]
    changed = replace(pipeline, recompute=tuple(tuple(row) for row in table))
    return with_pipeline(with_stream(plan, stage, stream), number, changed)


@mutation("which has 4")
def more_layers_are_recomputed_than_the_stage_has(plan: Plan, rng: random.Random) -> Plan | None:
    stage = rng.randrange(plan.layout.pp)
    return _with_recompute(plan, rng, stage, plan.layout.stage_layers[stage] + 1)


@mutation("which has 4")
def fewer_than_no_layers_are_recomputed(plan: Plan, rng: random.Random) -> Plan | None:
    return _with_recompute(plan, rng, rng.randrange(plan.layout.pp), -1)


@mutation("the recompute table must have")
def a_stage_is_missing_in_the_recompute_table(plan: Plan, rng: random.Random) -> Plan | None:
    number = rng.randrange(len(plan.pipelines))
    pipeline = plan.pipelines[number]
    return with_pipeline(plan, number, replace(pipeline, recompute=pipeline.recompute[:-1]))
