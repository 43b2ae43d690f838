"""Whether streams can wait for each other for ever: a graph of what each instruction needs."""

from __future__ import annotations

import graphlib
from collections.abc import Sequence

from ds_infinipipe.planner.plan.stream import Instruction, Op

__all__ = ["deadlocks"]

Place = tuple[int, int]
_SENDS = {Op.SEND_ACTIVATION: (Op.RECV_ACTIVATION, 1), Op.SEND_GRADIENT: (Op.RECV_GRADIENT, -1)}


def deadlocks(
    streams: Sequence[Sequence[Instruction]],
    *,
    connects_late: bool = False,
    waits_for_device: bool = False,
) -> bool:
    """True where no order of all instructions gives each what it needs, with nothing buffered.

    The first transfer between two ranks in a direction may need both hosts (`connects_late`), and
    every operation all transfers before it in its stream (`waits_for_device`).
    """
    partner = _partners(streams)
    first = _first_uses(streams)
    graph: dict[Place, set[Place]] = {}
    for stage, stream in enumerate(streams):
        posted: list[Place] = []
        for position, instruction in enumerate(stream):
            here = (stage, position)
            needs = {(stage, position - 1)} if position else set()
            if here in partner:
                posted.append(here)
                if connects_late and here in first:
                    needs |= _reached(first[here])
            elif waits_for_device or instruction.op is Op.STEP:
                needs = needs.union(*(_reached(partner[place]) for place in posted))
            else:
                needs = needs.union(
                    *(
                        _reached(partner[place])
                        for place in posted
                        if _takes(instruction, stream[place[1]])
                    )
                )
            graph[here] = needs
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return True
    return False


def _reached(place: Place) -> set[Place]:
    """What is over when a rank stands at a place, whether it gets past it or not."""
    stage, position = place
    return {(stage, position - 1)} if position else set()


def _takes(operation: Instruction, receive: Instruction) -> bool:
    if operation.op is Op.FORWARD:
        return receive == Instruction(Op.RECV_ACTIVATION, operation.chunk)
    return operation.op.makes_gradient and receive == Instruction(Op.RECV_GRADIENT, operation.chunk)


def _partners(streams: Sequence[Sequence[Instruction]]) -> dict[Place, Place]:
    """The other end of every send and receive."""
    place = {
        (stage, i.op, i.chunk): (stage, position)
        for stage, stream in enumerate(streams)
        for position, i in enumerate(stream)
    }
    result: dict[Place, Place] = {}
    for stage, stream in enumerate(streams):
        for position, i in enumerate(stream):
            if i.op in _SENDS:
                receive, step = _SENDS[i.op]
                other = place[stage + step, receive, i.chunk]
                result[stage, position], result[other] = other, (stage, position)
    return result


def _first_uses(streams: Sequence[Sequence[Instruction]]) -> dict[Place, Place]:
    """The first sends and receives of each rank and direction, and the peer's."""
    first = {
        (stage, op): (stage, next(n for n, i in enumerate(stream) if i.op is op))
        for stage, stream in enumerate(streams)
        for op in {i.op for i in stream}
    }
    result: dict[Place, Place] = {}
    for (stage, op), place in first.items():
        if op in _SENDS:
            receive, step = _SENDS[op]
            other = first[stage + step, receive]
            result[place], result[other] = other, place
    return result
