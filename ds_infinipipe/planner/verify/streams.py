"""The part of the verifier that judges each stage's stream by itself; transfers.py has the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op

__all__ = ["check_streams"]

_CONTEXT = 4  # instructions shown on either side of the marked one


def check_streams(plan: Plan, chains: Sequence[Sequence[int]]) -> None:
    """Raise ScheduleError unless each stream runs every chunk once, in order, within the window.

    `chains`: chunk ids of each cut sequence, its slices in order. The chunks and pipelines of the
    plan must have been checked.
    """
    if len(plan.streams) != plan.layout.pp:
        raise ScheduleError(
            f"the plan has {len(plan.streams)} streams, but its layout has pp {plan.layout.pp}"
        )
    for stage in range(plan.layout.pp):
        position = _check_inventory(plan, stage)
        _check_recompute(plan, stage)
        _check_local_order(plan, stage, chains, position)
        _check_pipeline_order(plan, stage)
        _check_window(plan, stage)


def _expected_ops(stage: int, pp: int, is_split: bool) -> list[Op]:
    """A backward is one B, or an I and a W; each chunk of each stage has its own choice."""
    backward = [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT] if is_split else [Op.BACKWARD]
    ops = [Op.FORWARD, *backward]
    if stage > 0:
        ops += [Op.RECV_ACTIVATION, Op.SEND_GRADIENT]
    if stage < pp - 1:
        ops += [Op.SEND_ACTIVATION, Op.RECV_GRADIENT]
    return ops


def _check_inventory(plan: Plan, stage: int) -> Mapping[tuple[Op, int], int]:
    """Every instruction that the stage needs exactly once, nothing else; returns positions."""
    stream = plan.streams[stage]
    steps = [index for index, instruction in enumerate(stream) if instruction.op is Op.STEP]
    if steps != [len(stream) - 1] or stream[-1] != Instruction(Op.STEP):
        raise ScheduleError(
            f"stage {stage} has STEP at positions {steps} of {len(stream)} instructions; it must "
            "stand once, at the end, without a chunk"
        )
    halves = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    split = {i.chunk for i in stream if i.op in halves}
    wanted = {
        (op, chunk)
        for chunk in range(len(plan.chunks))
        for op in _expected_ops(stage, plan.layout.pp, chunk in split)
    }
    position: dict[tuple[Op, int], int] = {}
    for index, instruction in enumerate(stream[:-1]):
        key = (instruction.op, instruction.chunk)
        if instruction.op is Op.BACKWARD and instruction.chunk in split:
            text = f"{instruction} is a whole backward, but its chunk has an I or W here too"
            _fail(plan, stage, index, text)
        if key not in wanted:
            _fail(
                plan, stage, index, f"{instruction} has no place on this stage of {plan.layout.pp}"
            )
        if key in position:
            _fail(plan, stage, index, f"{instruction} stands there a second time")
        position[key] = index
    missing = sorted((op.value, chunk) for op, chunk in wanted - position.keys())
    if missing:
        named = ", ".join(f"{op}{chunk}" for op, chunk in missing[:8])
        raise ScheduleError(f"stage {stage} lacks {named} ({len(missing)} missing in all)")
    return position


def _check_recompute(plan: Plan, stage: int) -> None:
    planned: dict[int, int] = {}
    for pipeline in plan.pipelines:
        planned.update(zip(pipeline.forward, pipeline.recompute[stage], strict=True))
    for index, instruction in enumerate(plan.streams[stage]):
        may_recompute = instruction.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)
        wanted = planned[instruction.chunk] if may_recompute else 0
        if instruction.recompute != wanted:
            _fail(
                plan,
                stage,
                index,
                f"{instruction} states {instruction.recompute} recomputed layers; "
                + (
                    f"the pipelines say {wanted}"
                    if may_recompute
                    else "only F, B and I may state any"
                ),
            )


def _check_local_order(
    plan: Plan, stage: int, chains: Sequence[Sequence[int]], position: Mapping[tuple[Op, int], int]
) -> None:
    def must_precede(first: tuple[Op, int], second: tuple[Op, int], why: str) -> None:
        # a pair of which one does not exist on this stage asks nothing
        if first in position and second in position and position[first] > position[second]:
            text = f"{second[0].value}{second[1]} stands before {first[0].value}{first[1]}, {why}"
            _fail(plan, stage, position[second], text)

    for chunk in range(len(plan.chunks)):
        forward, backward = (Op.FORWARD, chunk), _backward(position, chunk)
        weights = (Op.BACKWARD_WEIGHT, chunk)
        must_precede(backward, weights, "which keeps what the weights' gradients need")
        must_precede(forward, backward, "but a backward needs its forward")
        must_precede((Op.RECV_ACTIVATION, chunk), forward, "which receives what it consumes")
        must_precede((Op.RECV_GRADIENT, chunk), backward, "which receives what it consumes")
        must_precede(forward, (Op.SEND_ACTIVATION, chunk), "which produces what it sends")
        must_precede(backward, (Op.SEND_GRADIENT, chunk), "which produces what it sends")
    for chain in chains:
        for earlier, later in pairwise(chain):
            why = f"but chunks {earlier} and {later} hold successive slices of one sequence"
            must_precede((Op.FORWARD, earlier), (Op.FORWARD, later), why)
            must_precede(_backward(position, later), _backward(position, earlier), why)


def _backward(position: Mapping[tuple[Op, int], int], chunk: int) -> tuple[Op, int]:
    """The operation of the chunk that makes the gradient of its input."""
    whole = (Op.BACKWARD, chunk)
    return whole if whole in position else (Op.BACKWARD_INPUT, chunk)


def _check_pipeline_order(plan: Plan, stage: int) -> None:
    """Each stage runs a pipeline's chunks in the orders that the pipeline states."""
    for number, pipeline in enumerate(plan.pipelines):
        members = set(pipeline.forward)
        for ops, stated in (
            ((Op.FORWARD,), pipeline.forward),
            ((Op.BACKWARD, Op.BACKWARD_INPUT), pipeline.backward),
        ):
            own = [
                (index, instruction)
                for index, instruction in enumerate(plan.streams[stage])
                if instruction.op in ops and instruction.chunk in members
            ]
            for (index, instruction), wanted in zip(own, stated, strict=True):
                if instruction.chunk != wanted:
                    name = f"{instruction.op.value}{instruction.chunk}"
                    text = f"pipeline {number} states {ops[0].value}{wanted} here, not {name}"
                    _fail(plan, stage, index, text)


def _check_window(plan: Plan, stage: int) -> None:
    """Eq. 7: at most pp - 1 - stage + num_split chunks in flight (the paper's p is stage + 1).

    A chunk flies from its F to its B or I; what W still needs is counted as memory.
    """
    owner = {c: n for n, pipeline in enumerate(plan.pipelines) for c in pipeline.forward}
    in_flight: Counter[int] = Counter()
    for index, instruction in enumerate(plan.streams[stage]):
        if instruction.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            in_flight[owner[instruction.chunk]] -= 1
        elif instruction.op is Op.FORWARD:
            number = owner[instruction.chunk]
            in_flight[number] += 1
            window = plan.layout.pp - 1 - stage + plan.pipelines[number].num_split
            if in_flight[number] > window:
                text = (
                    f"{instruction} makes {in_flight[number]} chunks of pipeline {number} in "
                    f"flight, the window is pp - 1 - stage + num_split = {window}"
                )
                _fail(plan, stage, index, text)


def _fail(plan: Plan, stage: int, index: int, text: str) -> NoReturn:
    stream: Sequence[Instruction] = plan.streams[stage]
    before = " ".join(str(i) for i in stream[max(0, index - _CONTEXT) : index])
    after = " ".join(str(i) for i in stream[index + 1 : index + 1 + _CONTEXT])
    raise ScheduleError(
        f"stage {stage}, instruction {index}: {text} (... {before} >>{stream[index]}<< {after} ...)"
    )
