"""Gathers and sums are exactly those that the plan's order asks for, also across instructions."""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from ranks import run_strict

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case, exact_norms
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.planner.predict.time import all2alls_per_pass
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.shards.replica_sum import GradientSum, join_neighbours, owned_parameters

pytestmark = pytest.mark.ranks


def _expected_gathers(plan: Plan, stage: int) -> int:
    """Visits of layers whose parameters are not already there, from the visit before or at all."""
    last = stage == plan.layout.pp - 1
    decoders = list(range(plan.layout.stage_layers[stage] + (stage == 0)))
    forward = [*decoders, *([len(decoders)] if last else [])]
    visits: list[int] = []
    for instruction in plan.streams[stage]:
        if instruction.op is Op.FORWARD:
            visits += forward
        elif instruction.op is Op.BACKWARD:
            visits += reversed(decoders)
        elif instruction.op is Op.BACKWARD_INPUT:  # the embedding has no input gradient
            visits += reversed(decoders[stage == 0 :])
    if plan.setup.execution.keeps_gathered:
        return len(set(visits))
    return sum(a != b for a, b in zip([-1, *visits[:-1]], visits, strict=True))


def _count(rank: int, case: Case) -> list[tuple[int, int]]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    engine = exactness.build_engine(case)
    found = []
    for step in range(case.steps):
        batch = exactness.random_batch(case, step)
        drawn = exactness.draw_plan(engine, case, batch, step)
        plan = replace(drawn, setup=drawn.setup.run_with(keeps_gathered=step % 2 > 0))
        before = engine.sharding.counts["gather"]
        engine.train_plan(plan, batch)
        executed = engine.sharding.counts["gather"] - before
        found.append((executed, _expected_gathers(plan, engine.stage_id)))
        gathered = [p for p in engine.module.parameters() if p.ds_status.name == "AVAILABLE"]
        assert all(p.ds_persist for p in gathered), "parameters stayed gathered after the step"
    engine.close()
    return found


def _with_both_policies(rank: int, case: Case) -> list[list[torch.Tensor]]:
    """Gradients, and losses of an evaluation with its gathers, of one step run both ways."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    engine = exactness.build_engine(case)
    batch = exactness.random_batch(case, 0)
    drawn = exactness.draw_plan(engine, case, batch, 0)
    found: list[list[torch.Tensor]] = []
    for keeps in (False, True, False):
        plan = replace(drawn, setup=drawn.setup.run_with(keeps_gathered=keeps))
        kept: list[torch.Tensor] = []
        engine.before_step_hooks[:] = [
            lambda e, kept=kept: kept.extend(  # type: ignore[misc]
                e.sharding.full_gradient(p).clone() for p in e.module.parameters()
            )
        ]
        engine.train_plan(plan, batch)
        before = engine.sharding.counts["gather"]
        members = range(len(batch.ids))
        report = engine.evaluate_plan(plan, batch, batch, members)
        gathers = engine.sharding.counts["gather"] - before
        layers = len(engine.module.forward_funcs)
        assert gathers == (layers if keeps else layers * len(plan.chunks))
        assert all(
            p.ds_persist or p.ds_status.name == "NOT_AVAILABLE" for p in engine.module.parameters()
        )
        found.append([*kept, torch.tensor(report.sequence_losses)])
    engine.close()
    return found


def test_parameters_kept_gathered_give_the_same_gradients_to_the_last_bit() -> None:
    case = Case("llama", 2, 2, learning_rate=0.0, seed=3)
    for whole, kept, again in run_strict(_with_both_policies, 4, case, timeout=90.0):
        assert all(torch.equal(a, b) for a, b in zip(whole, kept, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize(("pp", "sp"), [(2, 2), (1, 2)])
def test_gathers_executed_are_the_gathers_planned(pp: int, sp: int) -> None:
    for counts in run_strict(_count, pp * sp, Case("llama", pp, sp, steps=3), timeout=90.0):
        for executed, planned in counts:
            assert executed == planned > 0


def _watch(engine: InfiniPipeEngine, events: list[str]) -> None:
    """Note when each layer has gradients, and each start of a sum, in the order they happen."""
    total = engine.sharding._sum  # type: ignore[attr-defined]
    reduce, gradients = engine.sharding.reduce, total._gradients

    def noted_reduce(layer: int) -> None:
        events.append(f"B{layer}")
        reduce(layer)

    def noted_gradients(layer: int) -> Any:
        events.append(f"sum{layer}")
        return gradients(layer)

    engine.sharding.reduce = noted_reduce  # type: ignore[method-assign]
    total._gradients = noted_gradients


def _sum_over_replicas(
    rank: int, case: Case
) -> list[tuple[int, list[str], list[str], list[torch.Tensor]]]:
    """For the same step with one replica late or the other: sums, events and gradients."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    engine = exactness.build_engine(case)
    batch = exactness.random_batch(case, 0)
    share = engine.replica_share(batch)
    plan = exactness.draw_plan(engine, case, share, 0)
    layers = len(engine.module.forward_funcs)
    expected = [f"sum{layer}" for layer in reversed(range(layers))]
    events: list[str] = []
    _watch(engine, events)
    found = []
    for late in range(case.dp):
        gradients: list[torch.Tensor] = []
        engine.before_step_hooks[:] = [
            lambda e, kept=gradients: kept.extend(  # type: ignore[misc]
                e.sharding.full_gradient(p).clone() for p in e.module.parameters()
            )
        ]
        events.clear()
        if engine.grid.replica == late:
            time.sleep(0.2)
        before = engine.sharding.counts["sum"]
        engine.train_plan(plan, share, whole=batch)
        found.append((engine.sharding.counts["sum"] - before, list(events), expected, gradients))
    engine.close()
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", 2, 1, 2, num_sequences=4, learning_rate=0.0),
        Case("qwen2", 1, 2, 2, tied=True, num_sequences=4, learning_rate=0.0, seed=1),
        Case("llama", 1, 1, 2, num_sequences=1, learning_rate=0.0),
        Case("llama", 1, 2, 2, num_sequences=4, learning_rate=0.0, shards_optimizer=True),
    ],
)
def test_each_layer_is_summed_over_replicas_once_and_before_the_layers_below(case: Case) -> None:
    world_size = case.pp * case.sp * case.dp
    for steps in run_strict(_sum_over_replicas, world_size, case, timeout=90.0):
        for started, events, expected, _ in steps:
            assert started == len(expected), "a layer's partitions are one stretch of the buffer"
            sums = [event for event in events if event.startswith("sum")]
            assert sums == expected
            if "B1" in events:
                last = len(events) - 1 - events[::-1].index("B0" if "B0" in events else "B1")
                assert sums[-2] in events[:last], "nothing ran beside the last layer's backward"
        first, second = (gradients for *_, gradients in steps)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_owned_parameters_belong_to_the_layer_whose_backward_comes_last() -> None:
    tied, norm, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    owned = owned_parameters([[tied], [other], [norm, tied]])
    assert [[id(p) for p in layer] for layer in owned] == [[id(tied)], [id(other)], [id(norm)]]


def test_views_that_touch_are_summed_as_one() -> None:
    buffer = torch.arange(10.0)
    views = [buffer[4:6], buffer[0:2], buffer[2:4], buffer[7:9]]
    runs = join_neighbours(views, buffer)
    assert [run.tolist() for run in runs] == [[0, 1, 2, 3, 4, 5], [7, 8]]


@pytest.mark.parametrize("calls", [[], [2, 1, 0], [1], [0], [2, 0], [2, 2]])
def test_sums_start_from_the_last_layer_whatever_is_asked_for(calls: list[int]) -> None:
    order: list[float] = []

    class Work:
        def wait(self) -> None:
            order.append(-1.0)

    def add_up(tensor: torch.Tensor) -> Work:
        order.append(float(tensor))
        return Work()

    total = GradientSum(3, lambda layer: [torch.tensor(float(layer))], add_up)
    for _ in range(2):
        order.clear()
        total.begin_step()
        for layer in calls:
            total.start(layer)
        total.finish()
        assert order == [2.0, 1.0, 0.0, -1.0, -1.0, -1.0]


def _all_to_alls(rank: int, case: Case, mode: str) -> list[tuple[int, int]]:
    """Executed on this rank in each step, and those the plan asks for."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    config = exactness.make_config(case)
    config["infinipipe"]["runtime"]["all_to_all"] = mode
    engine = exactness.engine_from_config(config, case.dtype)
    reference = exactness.Reference(engine, case)
    calls: list[int] = []
    run = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return run(*args, **kwargs)

    found = []
    per_layer = all2alls_per_pass(engine.module.setup)
    assert per_layer == (2 if mode == "fused" else 4)
    with mock.patch.object(dist, "all_to_all_single", counted), exact_norms(engine, case):
        for step in range(case.steps):
            calls.clear()
            difference = exactness._compare_step(engine, reference, case, step)
            assert difference.gradient_error <= exactness.FLOAT64_LIMIT, difference
            assert engine.plan is not None
            stream = engine.plan.streams[engine.stage_id]
            layers = engine.module.layout.stage_layers[engine.stage_id]
            passes = sum(layers for i in stream if i.op is Op.FORWARD or i.op.makes_gradient)
            passes += sum(i.recompute for i in stream if i.op.makes_gradient)
            found.append((len(calls), passes * per_layer))
    engine.close()
    return found


@pytest.mark.parametrize("mode", ["fused", "separate"])
def test_all_to_alls_executed_are_those_planned_and_exact(mode: str) -> None:
    case = Case("llama", 1, 4, zero_stage=0, float64=True, num_heads=4, steps=3, seed=2)
    counts = [c for rank in run_strict(_all_to_alls, 4, case, mode, timeout=120.0) for c in rank]
    assert all(executed == planned > 0 for executed, planned in counts)
