"""Order of one pipeline: blocks, their backward, windows and the loop of operations."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from oracles.orders import stage_operations

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.order import (
    backward_order,
    count_slices,
    forward_order,
    split_backwards,
    window_size,
)
from ds_infinipipe.planner.plan.stream import Op


def cut(sequence: int, *lengths: int) -> list[Chunk]:
    """A sequence cut into slices of these lengths, one chunk each."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    last = len(lengths) - 1
    return [
        Chunk((Slice(sequence, start, length, i == last),))
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def batched(sequence: int, *lengths: int) -> Chunk:
    return Chunk(tuple(Slice(sequence + i, 0, n, True) for i, n in enumerate(lengths)))


def test_longer_sequences_run_first() -> None:
    chunks = [batched(0, 5), *cut(1, 4, 4), *cut(2, 6, 6), *cut(3, 2, 2, 2), batched(4, 3, 4)]
    assert forward_order(chunks, range(len(chunks))) == (5, 6, 7, 3, 4, 1, 2, 8, 0)


def test_slices_run_in_order_even_when_their_chunks_are_numbered_otherwise() -> None:
    chunks = cut(0, 4, 4, 4)[::-1]
    assert forward_order(chunks, [0, 1, 2]) == (2, 1, 0)


def test_shorts_beside_a_slice_do_not_change_the_rank_of_its_sequence() -> None:
    first, tail = cut(0, 8, 4)
    heavy = Chunk((*tail.slices, Slice(9, 0, 100, True)))
    chunks = [first, heavy, *cut(1, 8, 5)]
    assert forward_order(chunks, range(4)) == (2, 3, 0, 1)


def test_equal_chunks_are_ordered_by_their_number() -> None:
    chunks = [batched(0, 4), batched(1, 4), batched(2, 4)]
    assert forward_order(chunks, [2, 0, 1]) == (0, 1, 2)


def test_backward_reverses_the_slices_inside_each_block() -> None:
    chunks = [*cut(0, 4, 4, 4), *cut(1, 4, 4), batched(2, 4), batched(3, 3)]
    assert backward_order(chunks, range(7)) == (2, 1, 0, 4, 3, 5, 6)


def test_backward_keeps_two_sequences_with_one_member_chunk_apart() -> None:
    chunks = [*cut(0, 4, 4), *cut(1, 4, 4)]
    assert backward_order(chunks, (0, 1, 2, 3)) == (1, 0, 3, 2)


def test_slices_are_counted_per_sequence_and_batched_chunks_count_one() -> None:
    chunks = [*cut(0, 4, 4, 4), *cut(1, 4, 4), batched(2, 4)]
    assert count_slices(chunks, range(6)) == 3
    assert count_slices(chunks, [3, 4, 5]) == 2
    assert count_slices(chunks, [5]) == 1
    assert count_slices(chunks, []) == 1


def test_window_is_equation_7_with_stages_from_zero() -> None:
    assert [window_size(4, stage, 3) for stage in range(4)] == [6, 5, 4, 3]


def test_operations_of_a_cut_sequence_by_hand() -> None:
    chunks = [*cut(0, 4, 4), batched(1, 3)]
    forward = forward_order(chunks, range(3))
    operations = stage_operations(forward, backward_order(chunks, forward), window_size(2, 1, 2))
    text = " ".join(f"{op.value}{chunk}" for op, chunk in operations)
    assert text == "F0 F1 B1 F2 B0 B2"


def test_a_window_below_the_slices_of_a_sequence_is_refused() -> None:
    chunks = cut(0, 4, 4, 4)
    with pytest.raises(ScheduleError, match="window of 2 chunks reaches B2 before F2"):
        stage_operations((0, 1, 2), backward_order(chunks, (0, 1, 2)), 2)


@given(
    slices=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    pp=st.integers(1, 5),
)
@examples(100)
def test_every_stage_runs_each_forward_once_before_its_backward(slices: list[int], pp: int) -> None:
    chunks = [chunk for i, n in enumerate(slices) for chunk in cut(i, *[2] * n)]
    forward = forward_order(chunks, range(len(chunks)))
    backward = backward_order(chunks, forward)
    num_split = count_slices(chunks, forward)
    for stage in range(pp):
        window = window_size(pp, stage, num_split)
        operations = stage_operations(forward, backward, window)
        assert [c for op, c in operations if op is Op.FORWARD] == list(forward)
        assert [c for op, c in operations if op is Op.BACKWARD] == list(backward)
        live: set[int] = set()
        for op, chunk in operations:
            if op is Op.FORWARD:
                live.add(chunk)
            else:
                live.remove(chunk)  # KeyError when the forward has not run
            assert len(live) <= window


def test_weight_gradients_stand_as_far_behind_as_asked_or_at_the_end() -> None:
    def split(delays: dict[int, int]) -> str:
        return " ".join(f"{op.value}{chunk}" for op, chunk in split_backwards(stage, delays))

    stage = [(Op(text[0]), int(text[1])) for text in ("F0", "F1", "B0", "F2", "B1", "B2")]
    assert split({}) == "F0 F1 B0 F2 B1 B2"
    assert split({0: 0, 2: 0}) == "F0 F1 I0 W0 F2 B1 I2 W2"
    assert split({0: 2, 1: 1, 2: 9}) == "F0 F1 I0 F2 I1 W0 I2 W1 W2"
