"""A plan's stream as DeepSpeed pipeline instructions."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

from ds_infinipipe.planner.types import Op, Plan

__all__ = [
    "BackwardChunk",
    "BackwardChunkInput",
    "BackwardChunkWeights",
    "EvaluateChunk",
    "ForwardChunk",
    "PlanSchedule",
    "RecvChunkActivation",
    "RecvChunkGradient",
    "SendChunkActivation",
    "SendChunkGradient",
    "StepPlan",
]


class ForwardChunk(PipeInstruction):
    """Run the stage's layers on a chunk. Roughly: `x = layers(x)`, keeping what backward needs."""


class EvaluateChunk(PipeInstruction):
    """Run the stage's layers on a chunk without keeping anything for a backward."""


class BackwardChunk(PipeInstruction):
    """Backpropagate through a chunk whose ForwardChunk ran, and reduce its gradients."""


class BackwardChunkInput(PipeInstruction):
    """Backpropagate through a chunk to its input; BackwardChunkWeights does the rest."""


class BackwardChunkWeights(PipeInstruction):
    """Make and reduce the weights' gradients that a chunk's BackwardChunkInput left."""


class SendChunkActivation(PipeInstruction):
    """Send a chunk's output to the next stage, which has the matching RecvChunkActivation."""


class RecvChunkActivation(PipeInstruction):
    """Post the receive of a chunk's input from the previous stage; ForwardChunk waits for it."""


class SendChunkGradient(PipeInstruction):
    """Send the gradient of a chunk's input to the previous stage."""


class RecvChunkGradient(PipeInstruction):
    """Post the receive of a chunk's output gradient; BackwardChunk or its first half waits."""


class StepPlan(PipeInstruction):
    """Reduce what is left to reduce and step the optimizer; last instruction of every stream."""


_PIPE_INSTRUCTIONS: dict[Op, type[PipeInstruction]] = {
    Op.FORWARD: ForwardChunk,
    Op.BACKWARD: BackwardChunk,
    Op.BACKWARD_INPUT: BackwardChunkInput,
    Op.BACKWARD_WEIGHT: BackwardChunkWeights,
    Op.SEND_ACTIVATION: SendChunkActivation,
    Op.RECV_ACTIVATION: RecvChunkActivation,
    Op.SEND_GRADIENT: SendChunkGradient,
    Op.RECV_GRADIENT: RecvChunkGradient,
    Op.STEP: StepPlan,
}


class PlanSchedule(PipeSchedule):
    """The stream of one stage, one instruction per step, in the order the plan fixed.

    `forward` is what a forward instruction becomes: ForwardChunk, or EvaluateChunk.
    """

    def __init__(
        self, plan: Plan, stage: int, forward: type[PipeInstruction] = ForwardChunk
    ) -> None:
        super().__init__(micro_batches=len(plan.chunks), stages=plan.layout.pp, stage_id=stage)
        self._stream = plan.for_stage(stage)
        self._kinds = {**_PIPE_INSTRUCTIONS, Op.FORWARD: forward}

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield one-instruction steps; the handler gets the planner's instruction and its place."""
        for position, instruction in enumerate(self._stream):
            yield [self._kinds[instruction.op](instruction=instruction, position=position)]

    def num_pipe_buffers(self) -> int:
        """None: activations are kept per chunk id, not in the base class's cyclic buffers."""
        return 0
