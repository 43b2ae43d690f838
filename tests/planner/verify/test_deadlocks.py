"""No order of transfers that could hang passes the verifier, and the planner makes none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from handmade import make_plan, packed, random_plan, rich_plan, whole
from hypothesis import given
from hypothesis import strategies as st
from oracles.deadlocks import deadlocks
from stream_orders import lean_streams, posted_ahead

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.planner.verify.transfers import check_transfers

seeds = st.integers(0, 2**32 - 1)
RECEIVES = (Op.RECV_ACTIVATION, Op.RECV_GRADIENT)


def _passes(plan: Plan) -> bool:
    try:
        check_transfers(plan)
    except ScheduleError:
        return False
    return True


def _hangs(streams: Sequence[Sequence[Instruction]]) -> bool:
    return deadlocks(streams, connects_late=True) or deadlocks(streams, waits_for_device=True)


def _evaluated(streams: Sequence[Sequence[Instruction]]) -> list[list[Instruction]]:
    """As the engine runs them without training."""
    kept = (Op.FORWARD, Op.SEND_ACTIVATION, Op.RECV_ACTIVATION)
    return [[i for i in stream if i.op in kept] for stream in streams]


@given(seeds)
@examples(60)
def test_lean_windows_and_split_backwards_of_any_kind_do_not_hang(seed: int) -> None:
    streams = lean_streams(np.random.default_rng(seed))
    assert not _hangs(streams)
    assert not deadlocks(_evaluated(streams), connects_late=True)
    assert not deadlocks(_evaluated(streams), waits_for_device=True)


@given(seeds)
@examples(60)
def test_the_verifier_judges_moved_receives_as_the_graph_does(seed: int) -> None:
    """Receives move ahead by a few places, which keeps every other rule."""
    rng = random.Random(seed)
    plan = random_plan(seed, max_sequences=6)
    assert _passes(plan) and not _hangs(plan.streams)
    streams = [list(stream) for stream in plan.streams]
    for stream in streams:
        for index in [n for n, i in enumerate(stream) if i.op in RECEIVES]:
            before = [n for n in range(index) if stream[n].op is stream[index].op]
            earliest = max([0, *(n + 1 for n in before)])
            if rng.random() < 0.3 and earliest < index:
                target = rng.randint(max(earliest, index - 6), index)
                stream.insert(target, stream.pop(index))
    moved = replace(plan, streams=tuple(map(tuple, streams)))
    assert _passes(moved) == (not _hangs(moved.streams))


def test_receives_posted_one_operation_ahead_are_refused() -> None:
    """The order of earlier versions: a receive before the F that its sender waits for."""
    plan = make_plan([5], [packed(1, whole(0, 5))], [(0,)], pp=2)
    ahead = replace(plan, streams=posted_ahead(plan.streams))
    assert " ".join(map(str, ahead.streams[0])) == "RECV_B0 F0 SEND_F0 B0 STEP"
    with pytest.raises(ScheduleError, match=r"where channels connect.*waits at RECV_B0 .*SEND_B0"):
        check_transfers(ahead)


@given(seeds)
@examples(40)
def test_receives_posted_ahead_are_refused_wherever_they_hang(seed: int) -> None:
    plan = random_plan(seed)
    ahead = replace(plan, streams=posted_ahead(plan.streams))
    assert _passes(ahead) == (not _hangs(ahead.streams))
    if plan.layout.pp > 1:  # every operation of all stages may wait for the device
        assert deadlocks(ahead.streams, waits_for_device=True)


def test_an_error_names_who_waits_for_what() -> None:
    plan = rich_plan()
    ahead = replace(plan, streams=posted_ahead(plan.streams))
    with pytest.raises(ScheduleError) as error:
        check_transfers(ahead)
    text = str(error.value)
    assert "deadlock where channels connect and nothing is buffered, with 3 stages stuck" in text
    assert "stage 0 waits at RECV_B2 (6 of" in text and "for SEND_B2 of stage 1" in text
