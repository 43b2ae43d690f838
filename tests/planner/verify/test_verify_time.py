"""The verifier's clocks: worked out by hand, and against the simulator that makes predictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from handmade import make_plan, packed, random_plan, rich_plan, whole, with_setup
from hypothesis import given
from hypothesis import strategies as st

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.planner.predict.simulate import forecast
from ds_infinipipe.planner.predict.time import ChunkCosts, CostModel
from ds_infinipipe.planner.search.replicas import idle_plan
from ds_infinipipe.planner.verify.frame import verify_plan
from ds_infinipipe.planner.verify.time import check_time, step_times


class WholeSeconds(CostModel):
    """Times that a step can be worked out from by hand."""

    def chunk_costs(self, chunks: tuple[Chunk, ...]) -> ChunkCosts:
        rows = np.ones((self.layout.pp, len(chunks)))
        ones = np.ones(len(chunks))
        return ChunkCosts(3 * rows, 5 * rows, 0.5 * ones, 0.25 * ones, 2 * rows, 4 * rows)


def test_a_step_of_two_stages_is_the_one_worked_out_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ds_infinipipe.planner.verify.time.CostModel", WholeSeconds)
    chunks = [packed(1, whole(i, 4)) for i in range(2)]
    plan = make_plan([4, 4], chunks, [(0, 1)], pp=2)
    # stage 0 runs F0 to 3 s and F1 to 6; stage 1 F0 from 3.25 to 6.25, B0 to 11.25, F1 to 14.25 and
    # B1 to 19.25; stage 0 B0 from 11.5 to 16.5 and B1 from 19.5 to 24.5; both work 16 s
    assert step_times(plan) == (24.5, pytest.approx(1 - 16 / 24.5))
    recomputing = make_plan([4, 4], chunks, [(0, 1)], pp=2, recompute=lambda stage, chunk: chunk)
    # a layer of chunk 1 on each stage: half a second in B1
    assert step_times(recomputing) == (25.5, pytest.approx(1 - 16.5 / 25.5))


def test_the_weights_half_of_a_backward_delays_no_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ds_infinipipe.planner.verify.time.CostModel", WholeSeconds)
    plan = make_plan([4], [packed(1, whole(0, 4))], [(0,)], pp=2, delay=lambda stage, chunk: 0)
    # F0 to 3, F0 to 6.25, I0 to 8.25, W0 beside I0 of stage 0, from 8.5 to 10.5, W0 to 14.5
    assert step_times(plan) == (14.5, pytest.approx(1 - 9 / 14.5))


@given(st.integers(0, 2**32 - 1))
@examples(100)
def test_clocks_agree_with_the_simulator(seed: int) -> None:
    plan = random_plan(seed)
    timeline = forecast(plan)
    step_s, bubble_ratio = step_times(plan)
    assert step_s == pytest.approx(timeline.makespan_s, rel=1e-12)
    assert bubble_ratio == pytest.approx(timeline.bubble_ratio, abs=1e-12)


@given(st.integers(0, 2**32 - 1))
@examples(50)
def test_figures_may_differ_by_rounding_and_by_no_more(seed: int) -> None:
    plan = random_plan(seed)
    stated = plan.predicted
    for step_s in (np.nextafter(stated.step_time_s, 0.0), stated.step_time_s * (1 + 1e-12)):
        for ratio in (np.nextafter(stated.bubble_ratio, -1.0), stated.bubble_ratio + 1e-12):
            figures = replace(stated, step_time_s=float(step_s), bubble_ratio=float(ratio))
            check_time(replace(plan, predicted=figures))
    with pytest.raises(ScheduleError, match="states a step time"):
        far = replace(stated, step_time_s=stated.step_time_s * (1 + 1e-8))
        check_time(replace(plan, predicted=far))


def test_the_error_names_both_numbers_and_the_repair() -> None:
    plan = rich_plan()
    true_s = plan.predicted.step_time_s
    wrong = replace(plan, predicted=replace(plan.predicted, step_time_s=2 * true_s))
    with pytest.raises(ScheduleError) as error:
        verify_plan(wrong)
    text = str(error.value)
    assert f"{2 * true_s:.12g} s" in text and f"take {true_s:.12g} s" in text
    assert "plan the batch again" in text and "\n" not in text


def test_a_deadlock_ends_the_walk() -> None:
    plan = rich_plan()
    silent = [i for i in plan.streams[0] if i != Instruction(Op.SEND_ACTIVATION, 3)]
    with pytest.raises(ScheduleError, match=r"deadlock: stages \[0, 1, 2\] wait"):
        step_times(replace(plan, streams=(tuple(silent), *plan.streams[1:])))


def test_constants_that_give_no_times_are_named() -> None:
    plan = rich_plan()
    with pytest.raises(ScheduleError, match="times cannot be counted"):
        check_time(with_setup(plan, cluster=replace(plan.cluster, peak_flops=0.0)))


def test_a_plan_without_sequences_takes_no_time() -> None:
    rich: Plan = rich_plan()
    idle = idle_plan(rich.setup, PlannerSettings())
    assert step_times(idle) == (0.0, 0.0)
    with pytest.raises(ScheduleError, match="states a step time of 1 s"):
        check_time(replace(idle, predicted=replace(idle.predicted, step_time_s=1.0)))
