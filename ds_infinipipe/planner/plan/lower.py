"""From compute order to instruction streams: recompute counts, communication, the final STEP.

A stage's stream reads `RECV_F0 F0 SEND_F0 RECV_F1 F1 SEND_F1 RECV_B0 B0 SEND_B0 ... STEP`. A send
follows its producer at once, and only then the next receive is posted: a transport without buffers
may hold up everything behind a receive until the peer sends, and the peer may need what was sent
before it (verify/transfers.py). Transfers overlap all the same where the host runs ahead of the
device. W sends nothing, so the receive of the operation behind it is posted before it.

Where two stages run their F and B in other orders, a sender may be held up until its peer, many
operations later, posts the receive. So a receive is posted earlier where the peer sends earlier: of
an F with j of the peer's B before it, at the latest behind the own B number j + 1 from 0, and of a
B alike. Windows of Eq. 7 never need that, those that shrink at the end of a long sequence do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.facts.setup import Layout
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.plan import PipelinePlan
from ds_infinipipe.planner.plan.stream import Instruction, Op

__all__ = ["lower_plan"]

# by what takes it: the receive, and where it comes from relative to the own stage
_SOURCES = {Op.FORWARD: (Op.RECV_ACTIVATION, -1), Op.BACKWARD: (Op.RECV_GRADIENT, 1)}
_OTHER = {Op.FORWARD: Op.BACKWARD, Op.BACKWARD: Op.FORWARD}


def lower_plan(
    pipelines: Sequence[PipelinePlan],
    chunks: Sequence[Chunk],
    layout: Layout,
    operations: Sequence[Sequence[tuple[Op, int]]],
) -> tuple[tuple[Instruction, ...], ...]:
    """One stream per stage from the compute operations `operations[stage]` of all pipelines.

    Channels between neighbours are first in, first out, so all stages must run their forwards in
    one order, and their backwards in one order; raises ScheduleError where they do not, or where an
    operation names a chunk that no pipeline holds.
    """
    if len(operations) != layout.pp:
        raise ScheduleError(
            f"there are operations for {len(operations)} stages, but the layout has pp {layout.pp}"
        )
    recompute = _recompute_by_chunk(pipelines, layout.pp)
    for stage, stage_operations in enumerate(operations):
        _check_known(stage, stage_operations, recompute[stage], len(chunks))
    _check_same_order("F", [[c for op, c in row if op is Op.FORWARD] for row in operations])
    _check_same_order("B", [[c for op, c in row if op.makes_gradient] for row in operations])
    return tuple(_lower_stage(stage, operations, recompute[stage]) for stage in range(layout.pp))


def _lower_stage(
    stage: int, operations: Sequence[Sequence[tuple[Op, int]]], recompute: Mapping[int, int]
) -> tuple[Instruction, ...]:
    receives = _receives(stage, operations)
    stream: list[Instruction] = []
    for number, (op, chunk) in enumerate(operations[stage]):
        stream.extend(receives[number])
        layers = recompute[chunk] if op.may_recompute else 0
        stream.append(Instruction(op, chunk, layers))
        stream.extend(_send_after(stage, len(operations), op, chunk))
    stream.append(Instruction(Op.STEP))
    return tuple(stream)


def _receives(
    stage: int, operations: Sequence[Sequence[tuple[Op, int]]]
) -> list[list[Instruction]]:
    """Receives that stand right before each operation of a stage."""
    kinds = [_kind(op) for op, _ in operations[stage]]
    behind = {kind: [n + 1 for n, own in enumerate(kinds) if own is kind] for kind in _SOURCES}
    others = {
        kind: _others_before(kind, operations[stage + step])
        for kind, (_, step) in _SOURCES.items()
        if 0 <= stage + step < len(operations)
    }
    posted: list[list[Instruction]] = [[] for _ in kinds]
    seen = dict.fromkeys(_SOURCES, 0)
    place = 0
    for number, kind in enumerate(kinds):
        if kind is None:
            continue
        if kind in others:
            latest = behind[_OTHER[kind]][others[kind][seen[kind]] + 1 :]
            receive = Instruction(_SOURCES[kind][0], operations[stage][number][1])
            posted[min([place, *latest[:1]])].append(receive)
        seen[kind] += 1
        place = number + 1
    return posted


def _kind(op: Op) -> Op | None:
    """F, or B for a whole backward or its first half; W takes nothing from another stage."""
    if op.makes_gradient:
        return Op.BACKWARD
    return op if op is Op.FORWARD else None


def _others_before(kind: Op, operations: Sequence[tuple[Op, int]]) -> list[int]:
    """Of each operation of a kind, how many of the other kind a stage does before it."""
    counts: list[int] = []
    others = 0
    for op, _ in operations:
        found = _kind(op)
        if found is kind:
            counts.append(others)
        elif found is not None:
            others += 1
    return counts


def _send_after(stage: int, pp: int, op: Op, chunk: int) -> tuple[Instruction, ...]:
    if op is Op.FORWARD and stage < pp - 1:
        return (Instruction(Op.SEND_ACTIVATION, chunk),)
    if op.makes_gradient and stage > 0:
        return (Instruction(Op.SEND_GRADIENT, chunk),)
    return ()


def _recompute_by_chunk(pipelines: Sequence[PipelinePlan], pp: int) -> list[dict[int, int]]:
    """`result[stage][chunk]`: decoder layers that the stage recomputes for the chunk."""
    table: list[dict[int, int]] = [{} for _ in range(pp)]
    for pipeline in pipelines:
        for stage in range(pp):
            table[stage].update(zip(pipeline.forward, pipeline.recompute[stage], strict=True))
    return table


def _check_known(
    stage: int, operations: Sequence[tuple[Op, int]], known: Mapping[int, int], num_chunks: int
) -> None:
    for op, chunk in operations:
        if not op.is_compute:
            raise ScheduleError(
                f"stage {stage} lists {op.value}{chunk}: only F, B, I and W are compute operations"
            )
        if chunk not in known or not 0 <= chunk < num_chunks:
            raise ScheduleError(
                f"stage {stage} lists {op.value}{chunk}, but chunk {chunk} is in no pipeline "
                f"(the plan has {num_chunks} chunks)"
            )


def _check_same_order(name: str, orders: Sequence[Sequence[int]]) -> None:
    """`orders[stage]`: chunks in the order of their F, or of their B and I."""
    first = orders[0]
    for stage, own in enumerate(orders[1:], start=1):
        if own != first:
            pairs = enumerate(zip(own, first, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(own), len(first)))
            raise ScheduleError(
                f"stage {stage} runs its {name} in another order than stage 0 "
                f"({len(own)} against {len(first)} of them, first difference at number {at}): "
                "channels are first in, first out, so all stages need one order"
            )
