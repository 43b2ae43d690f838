"""What each pipeline instruction does: one short function per entry of the engine's map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_infinipipe.planner.types import Instruction
from ds_infinipipe.runtime.finite import may_step
from ds_infinipipe.runtime.waits import Wait

if TYPE_CHECKING:
    from ds_infinipipe.runtime.engine import InfiniPipeEngine

__all__ = [
    "backward_chunk",
    "backward_chunk_input",
    "backward_chunk_weights",
    "evaluate_chunk",
    "forward_chunk",
    "recv_chunk_activation",
    "recv_chunk_gradient",
    "send_chunk_activation",
    "send_chunk_gradient",
    "step_plan",
]


def forward_chunk(engine: InfiniPipeEngine, instruction: Instruction, position: int) -> None:
    """Roughly: `outputs[chunk] = layers(inputs[chunk])`; the last stage adds to the loss."""
    step = engine.enter(instruction, position)
    given = step.chunk_input(instruction.chunk)
    with step.span(instruction):
        following = engine.upcoming_layer(position)
        output = engine.executor.forward(
            instruction.chunk, given, instruction.recompute, following, step.is_final(position)
        )
    if output is not None:
        step.outputs[instruction.chunk] = output


def evaluate_chunk(engine: InfiniPipeEngine, instruction: Instruction, position: int) -> None:
    """Roughly: `outputs[chunk] = layers(inputs[chunk])`, or the losses of the chunk's sequences."""
    step = engine.enter(instruction, position)
    given = step.chunk_input(instruction.chunk)
    with step.span(instruction):
        output = engine.executor.evaluate(given)
    step.clear_arena(instruction.chunk)
    if engine.is_last_stage():
        step.add_losses(instruction.chunk, output)
    else:
        step.outputs[instruction.chunk] = output


def backward_chunk(engine: InfiniPipeEngine, instruction: Instruction, position: int) -> None:
    """Roughly: `gradients[chunk] = d loss / d inputs[chunk]`."""
    step = engine.enter(instruction, position)
    given = step.output_gradient(instruction.chunk)
    with step.span(instruction):
        following = engine.upcoming_layer(position)
        gradient = engine.executor.backward(
            instruction.chunk, given, following, step.is_final(position)
        )
    step.finish_chunk(instruction.chunk)
    if gradient is not None and not engine.is_first_stage():
        step.gradients[instruction.chunk] = gradient


def backward_chunk_input(engine: InfiniPipeEngine, instruction: Instruction, position: int) -> None:
    """Roughly: `gradients[chunk] = d loss / d inputs[chunk]`, weights left for later."""
    step = engine.enter(instruction, position)
    given = step.output_gradient(instruction.chunk)
    with step.span(instruction):
        following = engine.upcoming_layer(position)
        gradient = engine.executor.backward_input(instruction.chunk, given, following)
    step.finish_chunk(instruction.chunk)
    if gradient is not None and not engine.is_first_stage():
        step.gradients[instruction.chunk] = gradient


def backward_chunk_weights(
    engine: InfiniPipeEngine, instruction: Instruction, position: int
) -> None:
    """Roughly: `weights.grad += d loss / d weights` of a chunk, from what its first half kept."""
    step = engine.enter(instruction, position)
    with step.span(instruction):
        engine.executor.backward_weight(instruction.chunk, step.is_final(position))


def send_chunk_activation(
    engine: InfiniPipeEngine, instruction: Instruction, position: int
) -> None:
    """Hand a chunk's output to the next stage; backward does not need it."""
    step = engine.enter(instruction, position)
    engine.channels.activations_out.send(instruction.chunk, step.outputs.pop(instruction.chunk))


def recv_chunk_activation(
    engine: InfiniPipeEngine, instruction: Instruction, position: int
) -> None:
    """Post the receive; `forward_chunk` waits for it."""
    step = engine.enter(instruction, position)
    engine.channels.activations_in.post_receive(
        instruction.chunk, *step.wire_format(instruction.chunk)
    )


def send_chunk_gradient(engine: InfiniPipeEngine, instruction: Instruction, position: int) -> None:
    """Hand the gradient of a chunk's input to the previous stage."""
    step = engine.enter(instruction, position)
    engine.channels.gradients_out.send(instruction.chunk, step.gradients.pop(instruction.chunk))


def recv_chunk_gradient(engine: InfiniPipeEngine, instruction: Instruction, position: int) -> None:
    """Post the receive; `backward_chunk` waits for it."""
    step = engine.enter(instruction, position)
    engine.channels.gradients_in.post_receive(
        instruction.chunk, *step.wire_format(instruction.chunk)
    )


def step_plan(engine: InfiniPipeEngine, instruction: Instruction, position: int) -> None:
    """Complete the step's gradients, then DeepSpeed's own clipping, optimizer and scheduler."""
    step = engine.enter(instruction, position)
    step.check_complete()
    with engine.waits.during(Wait.TRANSFERS):
        engine.channels.drain()
    with engine.waits.during(Wait.REDUCTIONS):
        engine.sharding.finish_gradients(engine.module.tied_parameter, engine.grid.tied_pg)
    for hook in engine.before_step_hooks:
        hook(engine)
    if may_step(engine, step):
        engine.step_optimizer()
    else:
        engine.skip_step()
