"""Bytes on their way between stages beside each operation: what `Ledger.transfers` counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ds_infinipipe.planner.plan.stream import Op

__all__ = ["transfer_bytes"]


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
