"""Bytes on their way between stages, against a case by hand and a walk over the streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from effort import examples
from handmade import random_plan
from hypothesis import given
from hypothesis import strategies as st
from oracles.transfers import transfer_bytes
from stream_orders import lean_streams

from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.planner.plan.transfers import taken_by_peers
from ds_infinipipe.planner.predict.schedule import load_kernels, stream_schedule

Streams = Sequence[Sequence[Instruction]]

F, B, HALF, WEIGHTS = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT


def test_two_stages_of_three_chunks_hold_what_is_worked_out_by_hand() -> None:
    first = [(F, 0), (F, 1), (B, 0), (F, 2), (B, 1), (B, 2)]
    second = [(F, 0), (B, 0), (F, 1), (B, 1), (F, 2), (B, 2)]
    # outputs of the first stage until a gradient comes that the second made after it took them;
    # gradients that come beside B
    assert transfer_bytes([first, second], [1, 10, 100])[0] == (
        1,
        1 + 10,
        10 + 1,  # B0: the second stage had taken output 0
        10 + 100,
        100 + 10,
        100,
    )
    # the second stage has gradients until the activation comes that was sent after them
    assert transfer_bytes([first, second], [1, 10, 100])[1] == (
        0,
        0,
        1,  # F1: stage 0 sent it before it took the gradient of 0
        1,
        10,  # F2: stage 0 has the gradient of 0, not yet that of 1
        10,
    )


def test_weights_gradients_change_nothing_and_see_what_is_there() -> None:
    whole = [(F, 0), (B, 0), (F, 1), (B, 1)]
    split = [(F, 0), (HALF, 0), (WEIGHTS, 0), (F, 1), (HALF, 1), (WEIGHTS, 1)]
    plain = transfer_bytes([whole, whole], [3, 5])
    found = transfer_bytes([whole, split], [3, 5])
    assert found[0] == plain[0]
    assert (found[1][0], found[1][1], found[1][3], found[1][4]) == plain[1]
    assert found[1][2] == 3 + 5  # the gradient sent, the activation to come
    assert found[1][5] == 5  # stage 0 had taken the gradient of 0 before it sent activation 1


def test_one_stage_transfers_nothing() -> None:
    assert transfer_bytes([[(F, 0), (B, 0)]], [7]) == ((0, 0),)


def _walked(streams: Streams, stage: int, sizes: list[int]) -> tuple[int, ...]:
    """By what each instruction of the stream does to a set of named tensors."""
    gradients_taken, activations_taken = taken_by_peers(streams, stage)
    alive: dict[tuple[str, int], int] = {}
    amounts = []

    def confirm(kind: str, chunk: int) -> None:
        sent = [key for key in alive if key[0] == kind]
        for key in sent[: sent.index((kind, chunk)) + 1] if (kind, chunk) in alive else []:
            del alive[key]

    for instruction in streams[stage]:
        op, chunk = instruction.op, instruction.chunk
        if op is Op.RECV_ACTIVATION:
            alive["activation due", chunk] = sizes[chunk]
        elif op is Op.RECV_GRADIENT:
            alive["gradient due", chunk] = sizes[chunk]
        elif op is Op.SEND_GRADIENT:
            alive["gradient sent", chunk] = sizes[chunk]
        elif op is Op.FORWARD:
            alive.pop(("activation due", chunk), None)
            confirm("gradient sent", gradients_taken.get(chunk, -1))
            if stage + 1 < len(streams):
                alive["output", chunk] = sizes[chunk]
        elif op.makes_gradient:
            confirm("output", activations_taken.get(chunk, -1))
        if op.is_compute:
            amounts.append(sum(alive.values()))
        if op.makes_gradient:
            alive.pop(("gradient due", chunk), None)
    return tuple(amounts)


@given(st.integers(0, 2**32 - 1))
@examples(60)
def test_any_orders_hold_what_a_walk_over_the_streams_finds(seed: int) -> None:
    """Those of windows that shrink at once too, where receives are posted early."""
    for streams in (random_plan(seed).streams, lean_streams(np.random.default_rng(seed))):
        sizes = [3 + 7 * index for index in range(1 + max(i.chunk for i in streams[0]))]
        operations = [[(i.op, i.chunk) for i in row if i.op.is_compute] for row in streams]
        walked = tuple(_walked(streams, stage, sizes) for stage in range(len(streams)))
        assert transfer_bytes(operations, sizes) == walked
        codes, _ = stream_schedule(streams, len(sizes))
        counted = load_kernels().transfer_bytes(codes.operations, np.array(sizes))
        assert [row[: len(own)].tolist() for row, own in zip(counted, walked, strict=True)] == [
            list(own) for own in walked
        ]


def test_an_activation_sent_three_gradients_early_is_received_behind_the_first() -> None:
    first = [(F, 0), (F, 1), (F, 2), (F, 3), (B, 0), (B, 1), (B, 2), (B, 3)]
    second = [(F, 0), (F, 1), (F, 2), (B, 0), (B, 1), (B, 2), (F, 3), (B, 3)]
    # stage 0 sends F3 before it takes any gradient: received behind B1, not behind B2
    found = transfer_bytes([first, second], [1, 10, 100, 1000])
    assert found[1] == (0, 0, 0, 0, 1, 1000 + 11, 111, 111)
