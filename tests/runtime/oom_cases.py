"""Engines that run out of memory where a test wants them to, compared with plain training."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case, Reference, exact_norms
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
    """Ranks run out of memory at the `nth` call of a place, before or after it, `times` times."""

    ranks: tuple[int, ...]
    place: str
    nth: int = 1
    times: int = 1
    is_after: bool = False
    error: Callable[[str], Exception] = torch.OutOfMemoryError


def inject(engine: InfiniPipeEngine, fault: Fault) -> Callable[[], int]:
    """Make this rank fail as described; returns a function that repairs it and counts failures."""
    *path, name = PLACES[fault.place].split(".")
    owner: Any = engine
    for part in path:
        owner = getattr(owner, part)
    original, calls, failures = getattr(owner, name), [0], [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        is_due = calls[0] == fault.nth and failures[0] < fault.times
        if is_due:
            calls[0] = 0
            failures[0] += 1
            if not fault.is_after:
                raise fault.error("injected: out of memory")
        result = original(*args, **kwargs)
        if is_due:
            raise fault.error("injected: out of memory")
        return result

    if engine.global_rank in fault.ranks:
        setattr(owner, name, call)

    def repair() -> int:
        if engine.global_rank in fault.ranks:
            setattr(owner, name, original)
        return failures[0]

    return repair


def make_engine(
    case: Case,
    *,
    plans_ahead: bool = False,
    timeout_s: float = 40.0,
    section: Mapping[str, Any] | None = None,
    fp16: Mapping[str, Any] | None = None,
    **recovery: Any,
) -> InfiniPipeEngine:
    """An engine that recovers, by default down to 99 % of the predicted peak.

    `section` and `fp16` go into the configuration's parts of those names.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    config = exactness.make_config(case)
    config["fp16"].update(fp16 or {})
    ours = config["infinipipe"]
    ours["recovery"] = {"enabled": True, "reduction": 0.99, **recovery}
    ours["runtime"]["timeout_s"] = timeout_s
    ours["planning"] = {"asynchronous": plans_ahead, "deadline_s": timeout_s / 2}
    ours["planner"]["solver"] = "greedy"
    ours.update(section or {})
    return exactness.engine_from_config(config, case.dtype)


@dataclass(frozen=True)
class Outcome:
    """One step with a fault: errors against the reference, and what the engine did about it."""

    loss_error: float
    gradient_error: float
    repeats: int
    failures: int
    limit_bytes: int
    peak_bytes: int


def train_with_faults(case: Case, faults: Sequence[Fault | None]) -> list[Outcome]:
    """A step for each fault, beside a reference that is trained alone from the same weights."""
    engine = make_engine(case)
    with exact_norms(engine, case):
        reference = Reference(engine, case)
        try:
            return [_step(engine, reference, case, i, f) for i, f in enumerate(faults)]
        finally:
            engine.close()


def _step(
    engine: InfiniPipeEngine, reference: Reference, case: Case, step: int, fault: Fault | None
) -> Outcome:
    batch, share, plan = _draw(engine, case, step, fault)
    if not case.float64:
        reference.copy_weights(engine)
    wanted, _ = reference.run(batch)
    errors: dict[str, float] = {}
    engine.before_step_hooks[:] = [
        lambda e: errors.update(exactness._gradient_errors(e, reference.gradients()))
    ]
    repair = inject(engine, fault) if fault is not None else lambda: 0
    loss = float(engine.train_plan(plan, share, whole=batch))
    reference.step()
    assert engine.plan is not None
    return Outcome(
        loss_error=abs(loss - wanted),
        gradient_error=max(errors.values()),
        repeats=engine.recovery.repeats,
        failures=repair(),
        limit_bytes=engine.plan.setup.limit_bytes,
        peak_bytes=max(engine.plan.predicted.peak_bytes),
    )


def _draw(
    engine: InfiniPipeEngine, case: Case, step: int, fault: Fault | None
) -> tuple[StepBatch, StepBatch, Plan]:
    """A batch, this replica's share and its plan, drawn until the fault has a place in it."""
    for number in range(step, step + 10_000, 100):
        batch = exactness.random_batch(case, number)
        share = engine.replica_share(batch)
        plan = exactness.draw_plan(engine, case, share, number)
        everywhere = [True] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everywhere, _has_place(engine, plan, fault))
        if all(everywhere):
            return batch, share, plan
    raise LookupError(f"100 random plans of {case} have no place for {fault}")


def _has_place(engine: InfiniPipeEngine, plan: Plan, fault: Fault | None) -> bool:
    if fault is None or engine.global_rank not in fault.ranks or fault.place not in _OCCURRENCES:
        return True
    occurrences = map(_OCCURRENCES[fault.place], plan.streams[engine.stage_id])
    return sum(occurrences) >= fault.nth


def end_with_fault(rank: int, case: Case, fault: Fault, recovery: dict[str, Any]) -> str:
    """Train until the fault ends the run: the error."""
    engine = make_engine(case, **recovery)
    inject(engine, fault)
    batch = exactness.random_batch(case, 0)
    share = engine.replica_share(batch)
    try:
        engine.train_plan(exactness.draw_plan(engine, case, share, 0), share, whole=batch)
    except InfiniPipeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return ""
