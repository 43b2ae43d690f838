"""From compute order to instruction streams: recompute counts, communication, the final STEP.

A stage's stream reads `RECV_F1 F0 SEND_F0 RECV_B0 F1 SEND_F1 B0 ... STEP`. Receives are posted one
compute operation before the one that consumes them, so that the transfer runs under it; sends
follow their producer at once. Both are asynchronous: a stage waits only where it consumes. W
consumes nothing and sends nothing, so it does not count as the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.facts.setup import Layout
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.plan import PipelinePlan
from ds_infinipipe.planner.plan.stream import Instruction, Op

__all__ = ["lower_plan"]


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
    return tuple(
        _lower_stage(stage, layout.pp, stage_operations, recompute[stage])
        for stage, stage_operations in enumerate(operations)
    )


def _lower_stage(
    stage: int, pp: int, operations: Sequence[tuple[Op, int]], recompute: Mapping[int, int]
) -> tuple[Instruction, ...]:
    fed = [(op, chunk) for op, chunk in operations if op is not Op.BACKWARD_WEIGHT]
    receives = [_receive_for(stage, pp, op, chunk) for op, chunk in fed]
    stream = list(receives[0]) if receives else []
    done = 0
    for op, chunk in operations:
        if op is not Op.BACKWARD_WEIGHT:
            done += 1
            stream.extend(receives[done] if done < len(receives) else ())
        layers = recompute[chunk] if op.may_recompute else 0
        stream.append(Instruction(op, chunk, layers))
        stream.extend(_send_after(stage, pp, op, chunk))
    stream.append(Instruction(Op.STEP))
    return tuple(stream)


def _receive_for(stage: int, pp: int, op: Op, chunk: int) -> tuple[Instruction, ...]:
    if op is Op.FORWARD and stage > 0:
        return (Instruction(Op.RECV_ACTIVATION, chunk),)
    if op.makes_gradient and stage < pp - 1:
        return (Instruction(Op.RECV_GRADIENT, chunk),)
    return ()


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
