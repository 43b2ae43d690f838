"""Plans whose split backwards are not one I and one W in order."""

from __future__ import annotations

import random
from dataclasses import replace

from handmade import with_setup
from mutations import drop, find, find_places, moved, mutation, repeat, with_stream

from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op


@mutation("lacks W")
def weight_gradients_are_missing(plan: Plan, rng: random.Random) -> Plan | None:
    return drop(plan, rng, Op.BACKWARD_WEIGHT)


@mutation("lacks I")
def an_input_gradient_is_missing(plan: Plan, rng: random.Random) -> Plan | None:
    return drop(plan, rng, Op.BACKWARD_INPUT)


@mutation("a second time")
def weight_gradients_are_taken_twice(plan: Plan, rng: random.Random) -> Plan | None:
    return repeat(plan, rng, Op.BACKWARD_WEIGHT)


@mutation("a second time")
def an_input_gradient_is_made_twice(plan: Plan, rng: random.Random) -> Plan | None:
    return repeat(plan, rng, Op.BACKWARD_INPUT)


@mutation("which keeps what the weights' gradients need")
def weight_gradients_precede_the_input_gradient(plan: Plan, rng: random.Random) -> Plan | None:
    places = find_places(plan, Op.BACKWARD_WEIGHT)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = plan.streams[stage]
    first = stream.index(find(plan, stage, Op.BACKWARD_INPUT, stream[index].chunk))
    return with_stream(plan, stage, moved(stream, index, first))


@mutation("has STEP at positions")
def weight_gradients_follow_the_step(plan: Plan, rng: random.Random) -> Plan | None:
    places = find_places(plan, Op.BACKWARD_WEIGHT)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = plan.streams[stage]
    return with_stream(plan, stage, moved(stream, index, len(stream)))


@mutation("is a whole backward, but its chunk has an I or W")
def a_split_chunk_has_a_whole_backward_too(plan: Plan, rng: random.Random) -> Plan | None:
    places = find_places(plan, Op.BACKWARD_INPUT)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = list(plan.streams[stage])
    whole = replace(stream[index], op=Op.BACKWARD)
    stream.insert(rng.choice([index, len(stream) - 1]), whole)
    return with_stream(plan, stage, stream)


@mutation("lacks I|whole backward")
def a_whole_backward_is_followed_by_weight_gradients(plan: Plan, rng: random.Random) -> Plan | None:
    places = find_places(plan, Op.BACKWARD)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = list(plan.streams[stage])
    stream.insert(index + 1, Instruction(Op.BACKWARD_WEIGHT, stream[index].chunk))
    return with_stream(plan, stage, stream)


@mutation("lacks W")
def another_stage_takes_the_weight_gradients(plan: Plan, rng: random.Random) -> Plan | None:
    """W moves to a stage that has the whole backward of the chunk."""
    whole = [(p, plan.streams[p][i].chunk) for p, i in find_places(plan, Op.BACKWARD)]
    places = [
        (p, i, q)
        for p, i in find_places(plan, Op.BACKWARD_WEIGHT)
        for q, chunk in whole
        if q > p and chunk == plan.streams[p][i].chunk
    ]
    if not places:
        return None
    stage, index, other = rng.choice(places)
    stream = plan.streams[stage]
    moved_there = with_stream(plan, other, (stream[index], *plan.streams[other]))
    return with_stream(moved_there, stage, stream[:index] + stream[index + 1 :])


@mutation("the limit is")
def what_weight_gradients_need_is_not_counted(plan: Plan, rng: random.Random) -> Plan | None:
    """All W's of the stage with most memory move to its end, under the old limit."""
    stage = max(range(plan.layout.pp), key=lambda p: plan.predicted.peak_bytes[p])
    stream = plan.streams[stage]
    late = [i for i in stream if i.op is Op.BACKWARD_WEIGHT]
    early = [i for i in stream if i.op not in (Op.BACKWARD_WEIGHT, Op.STEP)]
    if not late or early + late == list(stream[:-1]):
        return None
    stream = (*early, *late, stream[-1])
    return with_setup(with_stream(plan, stage, stream), limit_bytes=1)
