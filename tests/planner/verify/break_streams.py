"""Plans with a stream that skips, repeats, misorders or waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace

from mutations import (
    drop,
    find,
    find_places,
    moved,
    mutation,
    repeat,
    slice_pairs,
    swap,
    with_pipeline,
    with_stream,
)

from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op

Operations = list[tuple[Op, int]]


@mutation("lacks F")
def a_forward_is_missing(plan: Plan, rng: random.Random) -> Plan | None:
    return drop(plan, rng, Op.FORWARD)


@mutation("lacks B")
def a_backward_is_missing(plan: Plan, rng: random.Random) -> Plan | None:
    return drop(plan, rng, Op.BACKWARD)


@mutation("a second time")
def a_forward_runs_twice(plan: Plan, rng: random.Random) -> Plan | None:
    return repeat(plan, rng, Op.FORWARD)


@mutation("a second time")
def a_backward_runs_twice(plan: Plan, rng: random.Random) -> Plan | None:
    return repeat(plan, rng, Op.BACKWARD)


@mutation("lacks SEND_F")
def an_activation_is_not_sent(plan: Plan, rng: random.Random) -> Plan | None:
    return drop(plan, rng, Op.SEND_ACTIVATION)


@mutation("lacks RECV_F")
def an_activation_is_not_received(plan: Plan, rng: random.Random) -> Plan | None:
    return drop(plan, rng, Op.RECV_ACTIVATION)


@mutation("lacks SEND_B")
def a_gradient_is_not_sent(plan: Plan, rng: random.Random) -> Plan | None:
    return drop(plan, rng, Op.SEND_GRADIENT)


@mutation("lacks RECV_B")
def a_gradient_is_not_received(plan: Plan, rng: random.Random) -> Plan | None:
    return drop(plan, rng, Op.RECV_GRADIENT)


@mutation("a second time")
def a_gradient_is_sent_twice(plan: Plan, rng: random.Random) -> Plan | None:
    return repeat(plan, rng, Op.SEND_GRADIENT)


@mutation("a second time")
def an_activation_is_received_twice(plan: Plan, rng: random.Random) -> Plan | None:
    return repeat(plan, rng, Op.RECV_ACTIVATION)


@mutation("has no place on this stage")
def the_first_stage_receives_an_activation(plan: Plan, rng: random.Random) -> Plan | None:
    chunk = rng.randrange(len(plan.chunks))
    return with_stream(plan, 0, (Instruction(Op.RECV_ACTIVATION, chunk), *plan.streams[0]))


@mutation("has no place on this stage")
def the_last_stage_sends_an_activation(plan: Plan, rng: random.Random) -> Plan | None:
    stream = plan.streams[-1]
    extra = Instruction(Op.SEND_ACTIVATION, rng.randrange(len(plan.chunks)))
    return with_stream(plan, plan.layout.pp - 1, (*stream[:-1], extra, stream[-1]))


@mutation("has no place on this stage")
def an_instruction_names_a_chunk_that_does_not_exist(plan: Plan, rng: random.Random) -> Plan | None:
    stage = rng.randrange(plan.layout.pp)
    extra = Instruction(Op.FORWARD, len(plan.chunks))
    return with_stream(plan, stage, (extra, *plan.streams[stage]))


@mutation("but a backward needs its forward|stands before")
def a_backward_runs_before_its_forward(plan: Plan, rng: random.Random) -> Plan | None:
    stage, chunk = rng.randrange(plan.layout.pp), rng.randrange(len(plan.chunks))
    first, second = find(plan, stage, Op.FORWARD, chunk), find(plan, stage, Op.BACKWARD, chunk)
    return swap(plan, stage, first, second)


@mutation("successive slices|stands before")
def a_stage_runs_slices_forward_out_of_order(plan: Plan, rng: random.Random) -> Plan | None:
    if not slice_pairs(plan):
        return None
    stage, (earlier, later) = rng.randrange(plan.layout.pp), rng.choice(slice_pairs(plan))
    return swap(
        plan, stage, find(plan, stage, Op.FORWARD, earlier), find(plan, stage, Op.FORWARD, later)
    )


@mutation("successive slices|stands before")
def a_stage_runs_slices_backward_in_forward_order(plan: Plan, rng: random.Random) -> Plan | None:
    if not slice_pairs(plan):
        return None
    stage, (earlier, later) = rng.randrange(plan.layout.pp), rng.choice(slice_pairs(plan))
    return swap(
        plan,
        stage,
        find(plan, stage, Op.BACKWARD, earlier),
        find(plan, stage, Op.BACKWARD, later),
    )


@mutation("which receives what it consumes")
def a_receive_follows_its_consumer(plan: Plan, rng: random.Random) -> Plan | None:
    places = find_places(plan, Op.RECV_ACTIVATION, Op.RECV_GRADIENT)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = plan.streams[stage]
    receive = stream[index]
    op = Op.FORWARD if receive.op is Op.RECV_ACTIVATION else Op.BACKWARD
    consumer = stream.index(find(plan, stage, op, receive.chunk))
    return with_stream(plan, stage, moved(stream, index, consumer + 1))


@mutation("which produces what it sends")
def a_send_precedes_its_producer(plan: Plan, rng: random.Random) -> Plan | None:
    places = find_places(plan, Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = plan.streams[stage]
    op = Op.FORWARD if stream[index].op is Op.SEND_ACTIVATION else Op.BACKWARD
    producer = stream.index(find(plan, stage, op, stream[index].chunk))
    return with_stream(plan, stage, moved(stream, index, producer))


@mutation("first in, first out")
def receives_are_posted_in_another_order_than_sent(plan: Plan, rng: random.Random) -> Plan | None:
    """The later of two successive receives moves in front of the earlier one."""
    places = find_places(plan, Op.RECV_ACTIVATION, Op.RECV_GRADIENT)
    rng.shuffle(places)
    for stage, index in places:
        stream = plan.streams[stage]
        op = stream[index].op
        later = next((i for i in range(index + 1, len(stream)) if stream[i].op is op), None)
        if later is not None:
            return with_stream(plan, stage, moved(stream, later, index))
    return None


@mutation("recomputed layers; the pipelines say")
def forward_and_backward_recompute_differently(plan: Plan, rng: random.Random) -> Plan | None:
    stage, index = rng.choice(find_places(plan, Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT))
    stream = list(plan.streams[stage])
    stream[index] = replace(stream[index], recompute=stream[index].recompute + 1)
    return with_stream(plan, stage, stream)


@mutation("only F, B and I may state any")
def a_send_or_a_w_states_recomputed_layers(plan: Plan, rng: random.Random) -> Plan | None:
    places = find_places(plan, Op.SEND_ACTIVATION, Op.SEND_GRADIENT, Op.BACKWARD_WEIGHT)
    if not places:
        return None
    stage, index = rng.choice(places)
    stream = list(plan.streams[stage])
    stream[index] = replace(stream[index], recompute=1)
    return with_stream(plan, stage, stream)


@mutation("states [FB]")
def a_stage_leaves_the_order_of_its_pipeline(plan: Plan, rng: random.Random) -> Plan | None:
    """Two neighbours of the backward table change places; all streams keep the old order."""
    for number, pipeline in enumerate(plan.pipelines):
        order = list(pipeline.backward)
        for i in range(len(order) - 1):
            if tuple(sorted(order[i : i + 2])) not in [tuple(sorted(p)) for p in slice_pairs(plan)]:
                order[i], order[i + 1] = order[i + 1], order[i]
                return with_pipeline(plan, number, replace(pipeline, backward=tuple(order)))
    return None


@mutation("the window is")
def a_stage_has_too_many_chunks_in_flight(plan: Plan, rng: random.Random) -> Plan | None:
    """The last stage runs all forwards before its first backward."""
    if all(len(p.forward) <= p.num_split for p in plan.pipelines):
        return None
    stream = plan.streams[-1]
    head = [i for i in stream if i.op in (Op.FORWARD, Op.RECV_ACTIVATION)]
    rest = [i for i in stream if i.op not in (Op.FORWARD, Op.RECV_ACTIVATION)]
    return with_stream(plan, plan.layout.pp - 1, head + rest)


@mutation("deadlock")
def stages_wait_for_each_other(plan: Plan, rng: random.Random) -> Plan | None:
    """Stage 0 wants the gradient of y before it runs F of x, the last stage runs F of x before B
    of y. Each stage alone keeps every rule."""
    if plan.layout.pp < 2:
        return None
    whole = {Op.FORWARD: Op.FORWARD, Op.BACKWARD: Op.BACKWARD, Op.BACKWARD_INPUT: Op.BACKWARD}
    computed = [
        [(whole[i.op], i.chunk) for i in stream if i.op in whole] for stream in plan.streams
    ]
    delays = [d for y in range(len(plan.chunks)) for d in _delays(computed[0], computed[-1], y)]
    if not delays:
        return None
    computed[0] = rng.choice(delays)
    return replace(plan, streams=lower_plan(plan.pipelines, plan.chunks, plan.layout, computed))


def _delays(first: Operations, last: Operations, y: int) -> list[list[tuple[Op, int]]]:
    """Orders of stage 0 with some forwards moved behind B of y, one of which `last` runs before."""
    end, last_end = first.index((Op.BACKWARD, y)), last.index((Op.BACKWARD, y))
    orders = []
    for start in range(end):
        late = [o for o in first[start:end] if o[0] is Op.FORWARD]
        if first[start][0] is not Op.FORWARD or last.index(first[start]) > last_end:
            continue
        if all(first.index((Op.BACKWARD, chunk)) > end for _, chunk in late):
            kept = [o for o in first[:end] if o not in late]
            orders.append([*kept, first[end], *late, *first[end + 1 :]])
    return orders


@mutation("has STEP at positions")
def step_is_missing(plan: Plan, rng: random.Random) -> Plan | None:
    stage = rng.randrange(plan.layout.pp)
    return with_stream(plan, stage, plan.streams[stage][:-1])


@mutation("has STEP at positions")
def step_stands_twice(plan: Plan, rng: random.Random) -> Plan | None:
    return repeat(plan, rng, Op.STEP)


@mutation("has STEP at positions")
def step_is_not_last(plan: Plan, rng: random.Random) -> Plan | None:
    stage = rng.randrange(plan.layout.pp)
    *rest, step = plan.streams[stage]
    return with_stream(plan, stage, (*rest[:-1], step, rest[-1]))


@mutation("has STEP at positions")
def step_names_a_chunk(plan: Plan, rng: random.Random) -> Plan | None:
    stage = rng.randrange(plan.layout.pp)
    return with_stream(plan, stage, (*plan.streams[stage][:-1], Instruction(Op.STEP, 0)))


@mutation("streams, but its layout has")
def a_stream_is_missing(plan: Plan, rng: random.Random) -> Plan | None:
    return replace(plan, streams=plan.streams[:-1])


@mutation("no place on this stage|states .* recomputed layers")
def two_stages_exchange_their_streams(plan: Plan, rng: random.Random) -> Plan | None:
    if plan.layout.pp < 2:
        return None
    return replace(plan, streams=(*plan.streams[1:], plan.streams[0]))
