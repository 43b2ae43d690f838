"""Backwards split into input and weight gradients: sooner done, within memory, deterministic."""

from __future__ import annotations

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import plan_with, setup_of, tiny_setup

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import InfeasiblePlanError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.verify.frame import verify_plan

GIB = 2**30
LLAMA = BUILTIN_MODELS["llama-13b"]
LAYOUT = make_layout(LLAMA, 4, 8)
A800 = BUILTIN_CLUSTERS["a800-80g-4x8"]


def plan_law(law: str, memory_gib: float, **knobs: object) -> Plan:
    lengths = sample_lengths(law, 512, 65536, np.random.default_rng(5)).tolist()
    return plan_with(lengths, LLAMA, LAYOUT, A800, memory_limit_gib=memory_gib, **knobs)


def num_split(plan: Plan) -> int:
    return sum(i.op is Op.BACKWARD_WEIGHT for stream in plan.streams for i in stream)


@pytest.mark.parametrize("law", ["github-b", "commoncrawl"])
@pytest.mark.parametrize("memory_gib", [72.0, 40.0])
def test_splitting_shortens_the_step_and_keeps_within_the_limit(
    law: str, memory_gib: float
) -> None:
    split = plan_law(law, memory_gib)
    whole = plan_law(law, memory_gib, split_backward="never")
    verify_plan(split)
    assert num_split(split) > 0 and num_split(whole) == 0
    assert split.predicted.step_time_s < 0.995 * whole.predicted.step_time_s
    assert split.predicted.bubble_ratio < whole.predicted.bubble_ratio
    assert max(split.predicted.peak_bytes) <= memory_gib * GIB


def test_the_same_batch_is_split_alike() -> None:
    assert plan_law("github-b", 40.0).digest() == plan_law("github-b", 40.0).digest()


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=14),
    st.integers(2, 4),
    st.floats(0.55, 1.0),
)
@examples(25)
def test_no_plan_is_slower_for_being_split_or_breaks_its_limit(
    lengths: list[int], pp: int, share: float
) -> None:
    def planned(limit_gib: float, split: str) -> Plan | None:
        setup = tiny_setup(2 * pp, pp, limit_bytes=int(limit_gib * GIB))
        try:
            return plan_batch(lengths, setup, PlannerSettings(split_backward=split))
        except InfeasiblePlanError:
            return None

    ample = planned(1.0, "never")
    assert ample is not None
    limit_gib = share * max(ample.predicted.peak_bytes) / GIB
    split, whole = (planned(limit_gib, way) for way in ("auto", "never"))
    assert (split is None) == (whole is None)
    if split is not None and whole is not None:
        verify_plan(split)
        assert split.predicted.step_time_s <= whole.predicted.step_time_s
        assert max(split.predicted.peak_bytes) <= limit_gib * GIB


def test_a_single_stage_and_the_papers_mode_split_nothing() -> None:
    assert num_split(plan_law("github-b", 72.0, mode="paper")) == 0
    one = plan_batch([3000, 900, 700], setup_of(LLAMA, make_layout(LLAMA, 1, 8), A800))
    assert num_split(one) == 0
