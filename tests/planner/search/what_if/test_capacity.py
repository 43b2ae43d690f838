"""What an InfeasiblePlanError promises holds: the context fits, the next one does not."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from effort import examples
from hypothesis import event, given
from hypothesis import strategies as st
from planner_cases import PLAIN_FLOAT32, plan_with, setup_of, tiny_model

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import InfeasiblePlanError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.deadline import Deadline
from ds_infinipipe.planner.search.what_if import capacity
from ds_infinipipe.planner.search.what_if.capacity import Question, largest_context, largest_fitting
from ds_infinipipe.planner.verify.frame import verify_plan

GIB, MIB = 2**30, 2**20
LLAMA = BUILTIN_MODELS["llama-13b"]
A800 = BUILTIN_CLUSTERS["a800-80g-4x8"]
UNITS = {"GiB": GIB, "MiB": MIB}


def tiny_settings(limit_bytes: int, **knobs: object) -> dict[str, object]:
    fixed = {"mode": "paper", "loss_block_tokens": 16, "memory_limit_gib": limit_bytes / GIB}
    return {**fixed, **knobs}


def plan_tiny(lengths: list[int], planner: dict[str, object], pp: int = 2, sp: int = 1) -> Plan:
    model = tiny_model(4)
    layout = make_layout(model, pp, sp)
    return plan_with(lengths, model, layout, execution=PLAIN_FLOAT32, **planner)


def message(lengths: list[int], planner: dict[str, object], pp: int = 2, sp: int = 1) -> str:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_tiny(lengths, planner, pp, sp)
    return str(caught.value)


def stated_limit(text: str) -> int:
    found = re.search(r"a limit of ([\d.]+) (GiB|MiB) is enough for this batch", text)
    assert found is not None, text
    return round(float(found[1]) * UNITS[found[2]])


def stated_context(text: str) -> tuple[int, bool]:
    """The context, and whether it is the largest."""
    found = re.search(r"largest context .* planned alone, is (at least )?(\d+) tokens", text)
    assert found is not None, text
    return int(found[2]), found[1] is None


@pytest.mark.parametrize("recompute", ["adaptive", "none", "full"])
@pytest.mark.parametrize(("pp", "sp", "alignment"), [(1, 1, 1), (2, 1, 16), (3, 2, 1), (2, 2, 8)])
def test_the_largest_context_is_feasible_and_one_unit_more_is_not(
    monkeypatch: pytest.MonkeyPatch, recompute: str, pp: int, sp: int, alignment: int
) -> None:
    monkeypatch.setattr(capacity, "_BUDGET_S", 60.0)
    planner = tiny_settings(2 * MIB, recompute=recompute, alignment=alignment)
    context, is_largest = stated_context(message([9000, 40, 20], planner, pp, sp))
    assert is_largest
    verify_plan(plan_tiny([context], planner, pp, sp))
    message([context + int(np.lcm(sp, alignment))], planner, pp, sp)


def test_the_context_of_lean_mode_is_feasible_and_called_a_lower_bound() -> None:
    planner = tiny_settings(2 * MIB, mode="lean")
    context, is_largest = stated_context(message([9000, 40, 20], planner))
    assert not is_largest
    verify_plan(plan_tiny([context], planner))
    message([2 * context], planner)


@given(
    length=st.integers(1, 20_000),
    shorts=st.lists(st.integers(1, 500), max_size=6),
    limit_bytes=st.integers(300_000, 4 * MIB),
    recompute=st.sampled_from(["adaptive", "none", "full"]),
    pp=st.integers(1, 3),
    mode=st.sampled_from(["paper", "lean"]),
)
@examples(25)
def test_the_stated_limit_is_enough(
    length: int, shorts: list[int], limit_bytes: int, recompute: str, pp: int, mode: str
) -> None:
    planner = tiny_settings(limit_bytes, recompute=recompute, mode=mode)
    try:
        plan_tiny([length, *shorts], planner, pp)
    except InfeasiblePlanError as error:
        event("infeasible")
        enough = stated_limit(str(error)) + 1
        assert enough > limit_bytes
        roomy = tiny_settings(enough, recompute=recompute, mode=mode)
        verify_plan(plan_tiny([length, *shorts], roomy, pp))


def test_where_every_sequence_fits_alone_the_packing_is_named() -> None:
    planner = tiny_settings(stated_limit(message([3000], tiny_settings(MIB))) + 1)
    verify_plan(plan_tiny([3000], planner))
    text = message([3000, 800, 800, 120], planner)
    assert "so it is what is packed beside a sequence that does not fit" in text


def test_model_states_above_the_limit_also_name_sequence_bytes_and_a_limit_that_is_enough() -> None:
    text = message([900, 40, 20], tiny_settings(100_000))
    assert text.startswith("stage ")
    assert "No context fits at these settings; sequence 0 of 900 tokens" in text
    assert "layers recomputed; a limit of" in text
    assert "\n" not in text
    verify_plan(plan_tiny([900, 40, 20], tiny_settings(stated_limit(text) + 1)))


@pytest.mark.parametrize("mode", ["paper", "lean"])
def test_a_full_size_batch_is_explained(mode: str) -> None:
    lengths = sample_lengths("github-b", 512, 65536, np.random.default_rng(0))
    lengths[0] = 1_000_000
    layout = make_layout(LLAMA, 4, 8)
    setup = setup_of(LLAMA, layout, A800, limit_bytes=20 * GIB)
    question = Question(setup, PlannerSettings(mode=mode))
    found = largest_context(question, 1_000_000)
    assert 8192 < found.value < 1_000_000
    with pytest.raises(InfeasiblePlanError, match="sequence 0 of 1000000 tokens") as caught:
        plan_batch(lengths.tolist(), setup, question.settings)
    text = str(caught.value)
    assert f"{found.value} tokens" in text or "is at least" in text
    assert stated_limit(str(caught.value)) > 20 * GIB


@given(true_up_to=st.integers(0, 300), near=st.integers(1, 400), most=st.integers(1, 250))
def test_bisection_finds_the_border_from_anywhere(true_up_to: int, near: int, most: int) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        assert 1 <= n <= most
        asked.append(n)
        return n <= true_up_to

    found = largest_fitting(fits, near, most, Deadline())
    assert found.is_exact
    assert found.value == min(true_up_to, most)
    assert len(asked) == len(set(asked)) <= 20


def test_bisection_that_runs_out_of_time_keeps_what_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slow(n: int) -> bool:
        now[0] += 0.15
        return n <= 77

    found = largest_fitting(slow, 10, 1000, Deadline(0.4))
    assert not found.is_exact
    assert found.value == 40
