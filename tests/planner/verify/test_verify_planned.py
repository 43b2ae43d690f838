"""The verifier on plans that the planner made: they pass, and break when anything is changed."""

from __future__ import annotations

import functools
import random

import break_chunks
import break_frame
import break_pipelines
import break_splits
import break_streams
import break_times
import numpy as np
import pytest
from effort import examples, is_thorough
from hypothesis import assume, given
from hypothesis import strategies as st
from mutations import MUTATIONS
from planner_cases import plan_with, setup_of

from ds_infinipipe.errors import InfeasiblePlanError, ScheduleError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Execution, make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.verify.frame import peak_bytes_by_stage, verify_plan

BREAKERS = (
    break_chunks,
    break_pipelines,
    break_splits,
    break_streams,
    break_frame,
    break_times,
)  # fill MUTATIONS on import
CLUSTER = BUILTIN_CLUSTERS["cpu-local"]
GIB = 2**30
_FEW = 12  # plans that the quick tests share


@functools.cache
def planned(seed: int) -> Plan | None:
    """A plan for random lengths and layout, two of three with too little memory for everything.

    None where nothing fits.
    """
    rng = random.Random(seed)
    pp, sp = rng.choice([(1, 2), (2, 1), (2, 2), (3, 2), (4, 1)])
    model = ModelSpec("tiny", pp * rng.randint(1, 4), 64, 96, 4, 4, 16, 200)
    lengths = [rng.choice([rng.randint(1, 60), rng.randint(1, 900)]) for _ in range(12)]
    lengths[rng.randrange(12)] = rng.randint(600, 2500)
    zero_stage, alignment = rng.choice([0, 3]), rng.choice([1, 4])

    def plan_within(limit_gib: float) -> Plan:
        knobs = {"memory_limit_gib": limit_gib, "alignment": alignment, "loss_block_tokens": 32}
        return plan_with(
            lengths,
            model,
            make_layout(model, pp, sp),
            CLUSTER,
            Execution(zero_stage=zero_stage, dtype_bytes=4),
            **knobs,
        )

    ample = plan_within(1.0)
    if rng.random() < 1 / 3:
        return ample
    try:
        return plan_within(max(ample.predicted.peak_bytes) / GIB * rng.uniform(0.6, 0.95))
    except InfeasiblePlanError:
        return None


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1) if is_thorough() else st.integers(0, _FEW - 1))
@examples(40)
def test_the_planners_plans_pass_and_break_when_changed(seed: int) -> None:
    plan = planned(seed)
    assume(plan is not None)
    assert plan is not None
    verify_plan(Plan.from_json(plan.to_json()), plan.digest())
    zero_stage = plan.setup.execution.zero_stage
    for name, (break_plan, _) in MUTATIONS.items():
        if name == "the_plan_was_made_for_another_zero_stage" and zero_stage == 0:
            continue
        broken = break_plan(plan, random.Random(seed))
        if broken is None:
            continue
        try:
            verify_plan(broken)
        except ScheduleError:
            continue
        pytest.fail(f"seed {seed}: a plan broken by {name} passed")


@pytest.mark.slow
def test_random_plans_cover_tight_memory_and_every_kind_of_change() -> None:
    """The seeds above mean something: some plans recompute, most changes apply."""
    plans = [p for p in map(planned, range(_FEW)) if p is not None]
    assert len(plans) >= _FEW // 2
    recomputing = [p for p in plans if any(i.recompute for s in p.streams for i in s)]
    assert len(recomputing) >= _FEW // 4
    applied = {
        name: sum(break_plan(p, random.Random(1)) is not None for p in plans)
        for name, (break_plan, _) in MUTATIONS.items()
    }
    rarely = {name: count for name, count in applied.items() if not count}
    assert len(BREAKERS) == 6 and not rarely, rarely


@pytest.mark.parametrize(("pp", "sp"), [(16, 4), (64, 1)])
def test_a_plan_made_for_64_ranks_runs_dry(pp: int, sp: int) -> None:
    model = ModelSpec("big", 64, 8192, 28672, 64, 8, 128, 128256)
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7.5, 1.2, 96).astype(int) + 1, 32768).tolist()
    lengths[0] = 32768
    plan = plan_batch(
        lengths,
        setup_of(model, make_layout(model, pp, sp), BUILTIN_CLUSTERS["a800-80g-4x8"]),
        PlannerSettings(max_slices=6, solver="greedy"),
    )
    assert plan.layout.world_size == 64
    assert any(chunk.keeps_kv for chunk in plan.chunks)
    verify_plan(plan)
    assert max(peak_bytes_by_stage(plan)) <= plan.setup.limit_bytes
    assert 0 < plan.predicted.bubble_ratio < 1
