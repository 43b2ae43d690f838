"""Tensors on their way between two stages, and how long a stage has them.

A receive is posted behind the operation before it, or earlier (lower.py). What is sent lives until
the transport reports that it has left, at the latest until a tensor comes back that the peer sent
after it took the other one. So how much a stage holds depends on its neighbours' orders, not only
on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_infinipipe.planner.plan.stream import Instruction, Op

__all__ = ["taken_by_peers"]


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
