"""Engines that run out of memory where a test wants them to."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.errors import InfiniPipeError
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.stage.batch import StepBatch

# a method of the engine or its parts, by what it does
PLACES = {
    "begin": "executor.begin_step",
    "embedding": "executor._embed",
    "forward": "executor._decode",
    "head": "executor._head",
    "recompute": "executor._recompute",
    "backward": "executor._backward_segment",
    "gather": "sharding.fetch",
    "input gradients": "executor.backward_input",
    "weight gradients": "executor.backward_weight",
    "reduce": "sharding.reduce",
    "receive": "channels.activations_in.post_receive",
    "send": "channels.activations_out.send",
    "sum": "sharding.finish_gradients",
    "evaluate": "executor.evaluate",
    "optimizer": "step_optimizer",
}

# how often an instruction comes by a place that not every plan has
_OCCURRENCES: dict[str, Callable[[Instruction], int]] = {
    "recompute": lambda i: i.recompute if i.op is Op.FORWARD else 0,
    "input gradients": lambda i: i.op is Op.BACKWARD_INPUT,
    "weight gradients": lambda i: i.op is Op.BACKWARD_WEIGHT,
}


@dataclass(frozen=True)
class Fault:
    """Ranks run out of memory at the `nth` call of a place, before or after it."""

    ranks: tuple[int, ...]
    place: str
    nth: int = 1
    is_after: bool = False
    error: Callable[[str], Exception] = torch.OutOfMemoryError


def inject(engine: InfiniPipeEngine, fault: Fault) -> None:
    """Make this rank fail as described."""
    *path, name = PLACES[fault.place].split(".")
    owner: Any = engine
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == fault.nth and not fault.is_after:
            raise fault.error("injected: out of memory")
        result = original(*args, **kwargs)
        if calls[0] == fault.nth:
            raise fault.error("injected: out of memory")
        return result

    if engine.global_rank in fault.ranks:
        setattr(owner, name, call)


def make_engine(case: Case, section: Mapping[str, Any] | None = None) -> InfiniPipeEngine:
    """An engine whose wait for a peer ends the test; `section` goes into its configuration."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    config = exactness.make_config(case)
    ours = config["infinipipe"]
    ours["runtime"]["timeout_s"] = 20.0
    ours["planning"] = {"asynchronous": False, "deadline_s": 10.0}
    ours["planner"]["solver"] = "greedy"
    ours.update(section or {})
    return exactness.engine_from_config(config, case.dtype)


def end_with_fault(
    rank: int, case: Case, fault: Fault, section: Mapping[str, Any] | None = None
) -> str:
    """Train a step, or evaluate for a fault in that, until the fault ends the run: the error."""
    engine = make_engine(case, section)
    batch, share, plan = _draw(engine, case, fault)
    inject(engine, fault)
    try:
        if fault.place == "evaluate":
            engine.eval_batch(iter([[{"input_ids": ids} for ids in batch.ids]]))
        else:
            engine.train_plan(plan, share, whole=batch)
    except InfiniPipeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return ""


def _draw(engine: InfiniPipeEngine, case: Case, fault: Fault) -> tuple[StepBatch, StepBatch, Plan]:
    """A batch, this replica's share and its plan, drawn until the fault has a place in it."""
    for number in range(100):
        batch = exactness.random_batch(case, number)
        share = engine.replica_share(batch)
        plan = exactness.draw_plan(engine, case, share, number)
        everywhere = [True] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everywhere, _has_place(engine, plan, fault))
        if all(everywhere):
            return batch, share, plan
    raise LookupError(f"100 random plans of {case} have no place for {fault}")


def _has_place(engine: InfiniPipeEngine, plan: Plan, fault: Fault) -> bool:
    if engine.global_rank not in fault.ranks or fault.place not in _OCCURRENCES:
        return True
    occurrences = map(_OCCURRENCES[fault.place], plan.streams[engine.stage_id])
    return sum(occurrences) >= fault.nth
