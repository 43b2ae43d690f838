"""Tensors on their way between two stages, and how long a stage has them.

A receive is posted one operation ahead (lower.py). What is sent lives until the transport reports
that it has left, at the latest until a tensor comes back that the peer sent after it took the other
one. So how much a stage holds depends on its neighbours' orders, not only on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from ds_infinipipe.planner.types import Instruction, Op

__all__ = ["taken_by_peers", "transfer_bytes"]


def taken_by_peers(
    streams: Sequence[Sequence[Instruction]], stage: int
) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """What has certainly arrived when an activation, or a gradient, comes from a neighbour.

    By chunk of the tensor that came: the last chunk whose gradient the previous stage, and whose
    activation the next stage, had taken before it sent.
    """
    before = streams[stage - 1] if stage > 0 else ()
    after = streams[stage + 1] if stage + 1 < len(streams) else ()
    return (
        _last_before(before, (Op.BACKWARD, Op.BACKWARD_INPUT), Op.SEND_ACTIVATION),
        _last_before(after, (Op.FORWARD,), Op.SEND_GRADIENT),
    )


def _last_before(stream: Sequence[Instruction], taken: Sequence[Op], sent: Op) -> Mapping[int, int]:
    last, found = -1, {}
    for instruction in stream:
        if instruction.op in taken:
            last = instruction.chunk
        elif instruction.op is sent:
            found[instruction.chunk] = last
    return found


def transfer_bytes(
    operations: Sequence[Sequence[tuple[Op, int]]], hidden_bytes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """By stage and operation: bytes in transfer while it runs.

    The output of its own F and what came for its own B count, what came for F is the chunk's, and
    the gradient that B makes is a part of its work. `hidden_bytes` is by chunk. All stages run
    their forwards, and their backwards, in one order.
    """
    orders = [_Order(stage) for stage in operations]
    return tuple(
        _stage_transfers(
            stage,
            operations[stage],
            hidden_bytes,
            orders[stage - 1] if stage > 0 else None,
            orders[stage + 1] if stage + 1 < len(operations) else None,
        )
        for stage in range(len(operations))
    )


class _Order:
    """Of one stage: how many backwards come before each F, and forwards before each B."""

    def __init__(self, operations: Sequence[tuple[Op, int]]) -> None:
        self.backwards_before: list[int] = []
        self.forwards_before: list[int] = []
        for op, _ in operations:
            if op is Op.FORWARD:
                self.backwards_before.append(len(self.forwards_before))
            elif op.makes_gradient:
                self.forwards_before.append(len(self.backwards_before))


def _stage_transfers(
    stage: int,
    operations: Sequence[tuple[Op, int]],
    hidden_bytes: Sequence[int],
    before: _Order | None,
    after: _Order | None,
) -> tuple[int, ...]:
    sent = [0, *accumulate(hidden_bytes[c] for op, c in operations if op is Op.FORWARD)]
    returned = [0, *accumulate(hidden_bytes[c] for op, c in operations if op.makes_gradient)]
    forwards = backwards = 0
    amounts = []
    for op, chunk in operations:
        amount, made = 0, 0
        if op is Op.FORWARD:
            forwards += 1
        elif op.makes_gradient:
            backwards, made = backwards + 1, 1
        if after is not None:
            taken = after.forwards_before[backwards - 1] if backwards else 0
            amount += sent[forwards] - sent[taken] + made * hidden_bytes[chunk]
        if before is not None:
            taken = before.backwards_before[forwards - 1] if forwards else 0
            amount += returned[backwards - made] - returned[taken]
        amounts.append(amount)
    ahead = 0
    for at in reversed(range(len(operations))):
        op, chunk = operations[at]
        amounts[at] += ahead
        if op is not Op.BACKWARD_WEIGHT:
            comes = before is not None if op is Op.FORWARD else after is not None
            ahead = hidden_bytes[chunk] if comes else 0
    return tuple(amounts)
