"""Gathers are exactly those that the plan's order asks for, also across instructions."""

from __future__ import annotations

import logging
import warnings

import pytest
from ranks import run_ranks

from ds_infinipipe.planner.types import Op, Plan
from ds_infinipipe.runtime import selftest
from ds_infinipipe.runtime.selftest import Case

pytestmark = pytest.mark.ranks


def _expected_gathers(plan: Plan, stage: int) -> int:
    """Visits of layers whose parameters are not already there from the visit before."""
    last = stage == plan.layout.pp - 1
    decoders = list(range(plan.layout.stage_layers[stage] + (stage == 0)))
    forward = [*decoders, *([len(decoders)] if last else [])]
    visits: list[int] = []
    for instruction in plan.streams[stage]:
        if instruction.op is Op.FORWARD:
            visits += forward
        elif instruction.op is Op.BACKWARD:
            visits += reversed(decoders)
    return sum(a != b for a, b in zip([-1, *visits[:-1]], visits, strict=True))


def _count(rank: int, case: Case) -> list[tuple[int, int]]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    engine = selftest.build_engine(case)
    found = []
    for step in range(case.steps):
        batch = selftest.random_batch(case, step)
        plan = selftest.draw_plan(engine, case, batch, step)
        before = engine.sharding.counts["gather"]
        engine.train_plan(plan, batch)
        executed = engine.sharding.counts["gather"] - before
        found.append((executed, _expected_gathers(plan, engine.stage_id)))
        gathered = [p for p in engine.module.parameters() if p.ds_status.name == "AVAILABLE"]
        assert all(p.ds_persist for p in gathered), "parameters stayed gathered after the step"
    engine.close()
    return found


@pytest.mark.parametrize(("pp", "sp"), [(2, 2), (1, 2)])
def test_gathers_executed_are_the_gathers_planned(pp: int, sp: int) -> None:
    for counts in run_ranks(_count, pp * sp, Case("llama", pp, sp, steps=3), timeout=90.0):
        for executed, planned in counts:
            assert executed == planned > 0
