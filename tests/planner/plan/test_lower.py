"""Lowering: where sends, receives, recompute counts and STEP stand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from effort import examples
from handmade import operations_of, packed, pipeline_of, random_plan, tiny_model, whole
from hypothesis import given
from hypothesis import strategies as st

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.facts.setup import Layout, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.plan import PipelinePlan
from ds_infinipipe.planner.plan.stream import Instruction, Op

FED = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)  # that take what is received
RECEIVES = (Op.RECV_ACTIVATION, Op.RECV_GRADIENT)
SENDS = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
CHUNKS = (
    packed(1, Slice(0, 0, 4, False)),
    packed(1, Slice(0, 4, 4, True)),
    packed(1, whole(1, 3)),
)


def parts(
    chunks: Sequence[Chunk], forwards: Sequence[Sequence[int]], pp: int
) -> tuple[Layout, list[PipelinePlan]]:
    layout = make_layout(tiny_model(2 * pp), pp, 1)
    return layout, [
        pipeline_of(chunks, f, layout, lambda stage, chunk: chunk % 3) for f in forwards
    ]


def lowered(chunks: Sequence[Chunk], forwards: Sequence[Sequence[int]], pp: int) -> list[str]:
    layout, pipelines = parts(chunks, forwards, pp)
    streams = lower_plan(pipelines, chunks, layout, operations_of(pipelines, pp))
    return [" ".join(str(i) for i in stream) for stream in streams]


def test_two_stages_with_a_cut_sequence_lower_to_this_text() -> None:
    # Eq. 7 windows: 1 + 2 chunks in flight on stage 0, 2 on stage 1
    assert lowered(CHUNKS, [(0, 1, 2)], 2) == [
        "F0 SEND_F0 F1r1 SEND_F1 F2r2 SEND_F2 RECV_B1 B1r1 RECV_B0 B0 RECV_B2 B2r2 STEP",
        "RECV_F0 F0 RECV_F1 F1r1 B1r1 SEND_B1 RECV_F2 F2r2 B0 SEND_B0 B2r2 SEND_B2 STEP",
    ]


def test_one_stage_talks_to_nobody() -> None:
    assert lowered(CHUNKS, [(0, 1, 2)], 1) == ["F0 F1r1 B1r1 F2r2 B0 B2r2 STEP"]


def test_pipelines_follow_each_other_with_one_step_at_the_end() -> None:
    assert lowered(CHUNKS, [(2,), (0, 1)], 2) == [
        "F2r2 SEND_F2 RECV_B2 B2r2 F0 SEND_F0 F1r1 SEND_F1 RECV_B1 B1r1 RECV_B0 B0 STEP",
        "RECV_F2 F2r2 B2r2 SEND_B2 RECV_F0 F0 RECV_F1 F1r1 B1r1 SEND_B1 B0 SEND_B0 STEP",
    ]


def test_a_middle_stage_receives_and_sends_both_ways() -> None:
    middle = lowered(CHUNKS[2:], [(0,)], 3)[1]
    assert middle == "RECV_F0 F0 SEND_F0 RECV_B0 B0 SEND_B0 STEP"


@given(st.integers(0, 2**32 - 1))
@examples(100)
def test_receives_stand_behind_the_operation_before_their_consumer_and_its_send(seed: int) -> None:
    for stream in random_plan(seed).streams:
        fed = [index for index, i in enumerate(stream) if i.op in FED]
        for index, instruction in enumerate(stream):
            if instruction.op not in RECEIVES:
                continue
            consumer = next(n for n in fed if n > index)
            is_forward = stream[consumer].op is Op.FORWARD
            assert is_forward == (instruction.op is Op.RECV_ACTIVATION)
            assert stream[consumer].chunk == instruction.chunk
            before = max((n for n in fed if n < index), default=-1)
            assert all(i.op in SENDS for i in stream[before + 1 : index])


@given(st.integers(0, 2**32 - 1))
@examples(100)
def test_sends_follow_their_producer_at_once(seed: int) -> None:
    for stream in random_plan(seed).streams:
        for before, instruction in pairwise(stream):
            if instruction.op is Op.SEND_ACTIVATION:
                assert (before.op, before.chunk) == (Op.FORWARD, instruction.chunk)
            elif instruction.op is Op.SEND_GRADIENT:
                assert before.op.makes_gradient and before.chunk == instruction.chunk


@given(st.integers(0, 2**32 - 1))
@examples(100)
def test_receives_are_posted_in_the_order_of_the_sends(seed: int) -> None:
    streams = random_plan(seed).streams
    for upper, lower in pairwise(streams):
        assert _chunks(upper, Op.SEND_ACTIVATION) == _chunks(lower, Op.RECV_ACTIVATION)
        assert _chunks(lower, Op.SEND_GRADIENT) == _chunks(upper, Op.RECV_GRADIENT)


def _chunks(stream: Sequence[Instruction], op: Op) -> list[int]:
    return [i.chunk for i in stream if i.op is op]


def test_stages_that_disagree_on_the_order_cannot_be_lowered() -> None:
    layout, pipelines = parts(CHUNKS, [(0, 1, 2)], 2)
    first, second = operations_of(pipelines, 2)
    exchange = {(Op.BACKWARD, 0): (Op.BACKWARD, 2), (Op.BACKWARD, 2): (Op.BACKWARD, 0)}
    other = [exchange.get(operation, operation) for operation in second]
    with pytest.raises(ScheduleError, match=r"stage 1 runs its B in another order.*number 1"):
        lower_plan(pipelines, CHUNKS, layout, (first, other))


def test_operations_on_a_chunk_of_no_pipeline_cannot_be_lowered() -> None:
    layout, pipelines = parts(CHUNKS, [(0, 1)], 1)
    with pytest.raises(ScheduleError, match="F2, but chunk 2 is in no pipeline"):
        lower_plan(pipelines, CHUNKS, layout, [[(Op.FORWARD, 2)]])


def test_only_compute_operations_are_lowered() -> None:
    layout, pipelines = parts(CHUNKS, [(0, 1)], 1)
    with pytest.raises(ScheduleError, match="only F, B, I and W"):
        lower_plan(pipelines, CHUNKS, layout, [[(Op.SEND_ACTIVATION, 0)]])


def test_every_stage_needs_operations() -> None:
    layout, pipelines = parts(CHUNKS, [(0, 1, 2)], 2)
    with pytest.raises(ScheduleError, match="for 1 stages"):
        lower_plan(pipelines, CHUNKS, layout, operations_of(pipelines, 2)[:1])
