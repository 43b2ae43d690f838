"""The simulator against hand-worked timelines and a naive event-by-event reference."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from effort import examples
from handmade import make_plan, packed, random_plan, rich_plan, unit_timeline, whole
from hypothesis import given
from hypothesis import strategies as st
from oracles.simulate import simulate

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op, Span, Timeline

seeds = st.integers(0, 2**32 - 1)


def equal_chunks(n: int, num_split: int) -> tuple[list[int], list[Chunk]]:
    """n chunks of 4 tokens: sequences of `num_split` slices, or whole ones."""
    sequences = n // num_split
    chunks = [
        packed(1, Slice(s, 4 * i, 4, i == num_split - 1))
        for s in range(sequences)
        for i in range(num_split)
    ]
    return [4 * num_split] * sequences, chunks


def equal_plan(
    n: int,
    pp: int,
    num_split: int = 1,
    recompute: Callable[[int, int], int] = lambda stage, chunk: 0,
) -> Plan:
    lengths, chunks = equal_chunks(n, num_split)
    return make_plan(lengths, chunks, [range(n)], pp=pp, recompute=recompute)


def spans_of(timeline: Timeline, stage: int) -> list[tuple[str, float, float]]:
    return [
        (f"{s.op.value}{s.chunk}", s.start_s, s.end_s) for s in timeline.spans if s.stage == stage
    ]


def test_two_stages_two_chunks_have_this_timeline() -> None:
    plan = make_plan([4, 4], [packed(1, whole(i, 4)) for i in range(2)], [(0, 1)], pp=2)
    timeline = simulate(
        plan.streams,
        forward_s=[[1.0, 3.0], [2.0, 2.0]],
        backward_s=[[2.0, 2.0], [4.0, 5.0]],
        recompute_s=[0.0, 0.0],
        p2p_s=[0.5, 0.25],
    )
    # stage 0: F0 F1 B0 B1; stage 1: F0 B0 F1 B1
    assert spans_of(timeline, 0) == [
        ("F0", 0.0, 1.0),
        ("F1", 1.0, 4.0),
        ("B0", 8.0, 10.0),
        ("B1", 14.75, 16.75),
    ]
    assert spans_of(timeline, 1) == [
        ("F0", 1.5, 3.5),
        ("B0", 3.5, 7.5),
        ("F1", 7.5, 9.5),
        ("B1", 9.5, 14.5),
    ]
    assert timeline.makespan_s == 16.75
    assert timeline.busy_s == (8.0, 13.0)
    assert timeline.bubble_ratio == pytest.approx(1 - 21 / 33.5, abs=1e-15)


@pytest.mark.parametrize("num_split", [1, 4])
@pytest.mark.parametrize(("n", "pp"), [(24, 4), (40, 8), (4, 4), (8, 1)])
def test_equal_chunks_take_n_plus_pp_minus_1_times_a_chunk(n: int, pp: int, num_split: int) -> None:
    timeline = unit_timeline(equal_plan(n, pp, num_split))
    assert timeline.makespan_s == (n + pp - 1) * 3.0
    assert timeline.bubble_ratio == pytest.approx((pp - 1) / (n + pp - 1), abs=1e-12)


def test_recompute_of_one_chunk_on_one_stage_costs_one_layer() -> None:
    plan = equal_plan(24, 4, recompute=lambda stage, chunk: stage == 2 and chunk == 10)
    assert unit_timeline(plan).makespan_s == 81.0 + 0.5


def test_recompute_along_a_diagonal_costs_one_layer() -> None:
    """Eq. 15: what stage p recomputes for chunk k + p shares one bubble."""
    plan = equal_plan(24, 4, recompute=lambda stage, chunk: chunk == 10 + stage)
    assert unit_timeline(plan).makespan_s == 81.0 + 0.5


def test_recompute_of_one_chunk_on_every_stage_costs_a_layer_per_stage() -> None:
    plan = equal_plan(24, 4, recompute=lambda stage, chunk: chunk == 10)
    assert unit_timeline(plan).makespan_s == 81.0 + 4 * 0.5


def test_a_transfer_delays_only_its_consumer() -> None:
    plan = equal_plan(2, 2)
    timeline = simulate(
        plan.streams,
        forward_s=np.ones((2, 2)),
        backward_s=np.full((2, 2), 2.0),
        recompute_s=np.zeros(2),
        p2p_s=np.full(2, 0.25),
    )
    # stage 1: F0 at 1.25, B0 2.25, F1 4.25 (arrived at 2.25), B1 5.25 to 7.25; B1 of stage 0 7.5
    assert spans_of(timeline, 1)[2] == ("F1", 4.25, 5.25)
    assert timeline.makespan_s == 9.5


def test_a_split_backward_sends_its_gradient_before_its_weights() -> None:
    streams = [
        [Instruction.parse(t) for t in text.split()]
        for text in (
            "F0 SEND_F0 RECV_B0 I0 W0 STEP",
            "RECV_F0 F0 I0 SEND_B0 W0 STEP",
        )
    ]
    one = np.ones((2, 1))
    timeline = simulate(
        streams,
        forward_s=one,
        backward_s=4 * one,
        recompute_s=[0.0],
        p2p_s=[0.5],
        input_s=1.5 * one,
        weight_s=2 * one,
    )
    assert spans_of(timeline, 1) == [("F0", 1.5, 2.5), ("I0", 2.5, 4.0), ("W0", 4.0, 6.0)]
    assert spans_of(timeline, 0) == [("F0", 0.0, 1.0), ("I0", 4.5, 6.0), ("W0", 6.0, 8.0)]
    assert timeline.busy_s == (4.5, 4.5)


def test_a_split_backward_without_times_of_its_own_is_refused() -> None:
    stream = [Instruction.parse(t) for t in ("F0", "I0", "W0", "STEP")]
    one = np.ones((1, 1))
    with pytest.raises(ScheduleError, match="only times of whole backwards"):
        simulate([stream], forward_s=one, backward_s=one, recompute_s=[0.0], p2p_s=[0.0])


def test_recompute_lengthens_only_the_backward() -> None:
    plan = equal_plan(1, 1, recompute=lambda stage, chunk: 2)
    assert spans_of(unit_timeline(plan), 0) == [("F0", 0.0, 1.0), ("B0", 1.0, 4.0)]


def random_costs(plan: Plan, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (plan.layout.pp, len(plan.chunks))
    return {
        "forward_s": rng.uniform(0.1, 2.0, shape),
        "backward_s": rng.uniform(0.1, 4.0, shape),
        "recompute_s": rng.uniform(0.0, 1.0, shape[1]),
        "p2p_s": rng.uniform(0.0, 0.5, shape[1]),
        "input_s": rng.uniform(0.1, 2.0, shape),
        "weight_s": rng.uniform(0.1, 2.0, shape),
    }


def event_by_event(
    streams: Sequence[Sequence[Instruction]],
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    recompute_s: np.ndarray,
    p2p_s: np.ndarray,
    input_s: np.ndarray,
    weight_s: np.ndarray,
) -> list[Span]:
    """Events in order of time: an operation ends, a tensor arrives. Nothing is looked ahead."""
    pp = len(streams)
    queues = [[i for i in s if i.op.is_compute] for s in streams]
    arrived = [set[tuple[Op, int]]() for _ in streams]
    is_busy = [False] * pp
    spans: list[Span] = []
    events: list[tuple[float, int, int, str, Op, int]] = []
    ticket = count()

    def try_to_start(stage: int, now_s: float) -> None:
        if is_busy[stage] or not queues[stage]:
            return
        head = queues[stage][0]
        is_back = head.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        is_fed = is_back or (head.op is Op.FORWARD and stage > 0)
        if is_fed and (Op.BACKWARD if is_back else head.op, head.chunk) not in arrived[stage]:
            return
        queues[stage].pop(0)
        is_busy[stage] = True
        if head.op is Op.FORWARD:
            end_s = now_s + float(forward_s[stage, head.chunk])
        elif head.op is Op.BACKWARD_WEIGHT:
            end_s = now_s + float(weight_s[stage, head.chunk])
        else:
            own_s = backward_s if head.op is Op.BACKWARD else input_s
            end_s = now_s + float(own_s[stage, head.chunk])
            end_s += head.recompute * float(recompute_s[head.chunk])
        spans.append(Span(stage, head.op, head.chunk, now_s, end_s))
        heapq.heappush(events, (end_s, next(ticket), stage, "end", head.op, head.chunk))

    for stage in range(pp):
        try_to_start(stage, 0.0)
    while events:
        now_s, _, stage, what, op, chunk = heapq.heappop(events)
        if what == "arrival":
            arrived[stage].add((op, chunk))
        else:
            is_busy[stage] = False
            target = stage + 1 if op is Op.FORWARD else stage - 1
            if op is Op.FORWARD and stage == pp - 1:
                arrived[stage].add((Op.BACKWARD, chunk))
            elif 0 <= target < pp and op is not Op.BACKWARD_WEIGHT:
                at_s = now_s + float(p2p_s[chunk])
                kind = op if op is Op.FORWARD else Op.BACKWARD
                heapq.heappush(events, (at_s, next(ticket), target, "arrival", kind, chunk))
        try_to_start(stage, now_s)
    return sorted(spans, key=lambda s: (s.stage, s.start_s))


@given(seeds)
@examples(150)
def test_every_span_equals_the_event_by_event_reference(seed: int) -> None:
    plan = random_plan(seed)
    costs = random_costs(plan, seed)
    timeline = simulate(plan.streams, **costs)
    assert list(timeline.spans) == event_by_event(plan.streams, **costs)
    ends = [span.end_s for span in timeline.spans]
    assert timeline.makespan_s == max(ends)


@given(seeds)
@examples(50)
def test_the_step_is_never_shorter_than_the_busiest_stage(seed: int) -> None:
    plan = random_plan(seed)
    timeline = simulate(plan.streams, **random_costs(plan, seed))
    assert timeline.makespan_s >= max(timeline.busy_s) - 1e-9
    assert -1e-12 <= timeline.bubble_ratio < 1


def test_times_are_plain_floats() -> None:
    plan = rich_plan()
    timeline = simulate(plan.streams, **random_costs(plan, 0))
    numbers = [timeline.makespan_s, timeline.bubble_ratio, *timeline.busy_s]
    numbers += [t for s in timeline.spans for t in (s.start_s, s.end_s)]
    assert {type(n) for n in numbers} == {float}


def test_a_deadlock_shows_where_each_stage_stands() -> None:
    streams = [
        [Instruction.parse(t) for t in text.split()]
        for text in (
            "F0 SEND_F0 RECV_B0 B0 F1 SEND_F1 RECV_B1 B1 STEP",
            "RECV_F0 RECV_F1 F0 F1 B0 SEND_B0 B1 SEND_B1 STEP",
        )
    ]
    unit = np.ones((2, 2))
    with pytest.raises(ScheduleError) as error:
        simulate(streams, forward_s=unit, backward_s=unit, recompute_s=[0, 0], p2p_s=[0, 0])
    first, second = str(error.value).splitlines()[1:]
    assert first.endswith("F0 SEND_F0 RECV_B0 | B0 waits for SEND_B0 of stage 1")
    assert second.endswith("RECV_F0 RECV_F1 F0 | F1 waits for SEND_F1 of stage 0")
    assert "3/9" in first and "3/9" in second


def test_the_deadlock_grid_stays_short_for_many_stages() -> None:
    plan = equal_plan(2, 40)
    stream = [i for i in plan.streams[39] if str(i) != "SEND_B0"]
    streams = (*plan.streams[:39], tuple(stream))
    with pytest.raises(ScheduleError) as error:
        unit_timeline(replace(plan, streams=streams))
    assert "and 24 more stages" in str(error.value)
    assert len(str(error.value).splitlines()) == 18


def test_costs_of_another_number_of_stages_are_refused() -> None:
    plan = rich_plan()
    costs = random_costs(plan, 0)
    costs["forward_s"] = costs["forward_s"][:-1]
    with pytest.raises(ScheduleError, match=r"shape \[3, chunks\]"):
        simulate(plan.streams, **costs)


def test_no_chunks_take_no_time() -> None:
    streams = [[Instruction(Op.STEP)]] * 2
    empty = np.zeros((2, 0))
    timeline = simulate(streams, forward_s=empty, backward_s=empty, recompute_s=[], p2p_s=[])
    assert (timeline.makespan_s, timeline.bubble_ratio, timeline.spans) == (0.0, 0.0, ())
