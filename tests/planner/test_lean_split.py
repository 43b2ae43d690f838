"""Backwards split into input and weight gradients: sooner done, within memory, deterministic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import CLUSTER, tiny_model

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import InfeasiblePlanError
from ds_infinipipe.planner.search import plan_batch
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import BUILTIN_CLUSTERS, BUILTIN_MODELS, make_layout
from ds_infinipipe.planner.types import Op, Plan
from ds_infinipipe.planner.verify import verify_plan

GIB = 2**30
LLAMA = BUILTIN_MODELS["llama-13b"]
LAYOUT = make_layout(LLAMA, 4, 8)
A800 = BUILTIN_CLUSTERS["a800-80g-4x8"]


def plan_law(law: str, memory_gib: float, **knobs: object) -> Plan:
    lengths = sample_lengths(law, 512, 65536, np.random.default_rng(5)).tolist()
    chosen = PlannerSettings.model_validate({"memory_limit_gib": memory_gib, **knobs})
    return plan_batch(lengths, model=LLAMA, cluster=A800, layout=LAYOUT, settings=chosen)


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
@settings(max_examples=25, deadline=None)
def test_no_plan_is_slower_for_being_split_or_breaks_its_limit(
    lengths: list[int], pp: int, share: float
) -> None:
    model = tiny_model(2 * pp)
    setup = {"model": model, "cluster": CLUSTER, "layout": make_layout(model, pp, 1)}

    def planned(limit_gib: float, split: str) -> Plan | None:
        chosen = PlannerSettings.model_validate(
            {"memory_limit_gib": limit_gib, "split_backward": split}
        )
        try:
            return plan_batch(lengths, settings=chosen, **setup)
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
    one = plan_batch(
        [3000, 900, 700],
        model=LLAMA,
        cluster=A800,
        layout=make_layout(LLAMA, 1, 8),
        settings=PlannerSettings(memory_limit_gib=72.0),
    )
    assert num_split(one) == 0
