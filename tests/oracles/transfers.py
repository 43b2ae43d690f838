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
    the gradient that B makes is a part of its work. Beside W the next receive is posted.
    `hidden_bytes` is by chunk. All stages run
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
    for first, consumer, chunk in _waiting_receives(operations, before, after):
        for at in range(first, consumer):
            amounts[at] += hidden_bytes[chunk]
    return tuple(amounts)


def _waiting_receives(
    operations: Sequence[tuple[Op, int]], before: _Order | None, after: _Order | None
) -> list[tuple[int, int, int]]:
    """Of each receive: the operation it is posted before, the one that takes it, the chunk.

    Posted behind the operation before its taker, or behind the second one of the other kind that
    the sender does not wait for.
    """
    fed = [at for at, (op, _) in enumerate(operations) if op is not Op.BACKWARD_WEIGHT]
    forwards = [at for at in fed if operations[at][0] is Op.FORWARD]
    backwards = [at for at in fed if operations[at][0] is not Op.FORWARD]
    receives = []
    for mine, others, peer in (
        (forwards, backwards, before and before.backwards_before),
        (backwards, forwards, after and after.forwards_before),
    ):
        for number, taker in enumerate(mine) if peer is not None else ():
            behind = [at for at in fed if at < taker][-1:] + others[peer[number] + 1 :][:1]
            post = min([at + 1 for at in behind if at < taker], default=0)
            receives.append((post, taker, operations[taker][1]))
    return receives
