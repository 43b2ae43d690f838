"""Planning ends at its deadline with a plan that says so."""

from __future__ import annotations

import time

import numpy as np
import pytest
from planner_cases import CLUSTER, tiny_model
from pydantic import ValidationError

from ds_infinipipe.config import InfiniPipeConfig
from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import ConfigError, InfeasiblePlanError
from ds_infinipipe.planner.candidates import Chunking
from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.deadline import Deadline
from ds_infinipipe.planner.search import plan_batch
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import BUILTIN_CLUSTERS, BUILTIN_MODELS, make_layout
from ds_infinipipe.planner.types import Plan
from ds_infinipipe.planner.verify import verify_plan

LLAMA = BUILTIN_MODELS["llama-13b"]
A800 = BUILTIN_CLUSTERS["a800-80g-4x8"]
LAYOUT = make_layout(LLAMA, 4, 8)


def plan_github(deadline_s: float | str | None, memory_gib: float = 25.0) -> Plan:
    lengths = sample_lengths("github-b", 256, 65536, np.random.default_rng(3))
    knobs = {"mode": "paper", "deadline_s": deadline_s, "memory_limit_gib": memory_gib}
    return plan_batch(
        lengths.tolist(),
        model=LLAMA,
        cluster=A800,
        layout=LAYOUT,
        settings=PlannerSettings.model_validate(knobs),
    )


def test_without_time_for_any_solve_a_greedy_plan_is_returned_and_says_so() -> None:
    plan = plan_github(1e-6)
    verify_plan(plan)
    assert plan.solver.status == "fallback"
    assert plan.solver.note == "deadline of 1e-06 s reached before any plan, a greedy one is taken"


def test_the_incumbent_is_returned_when_the_deadline_falls_between_two_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[int] = []
    group = Chunking.group

    def counted(self: Chunking, below_s: float = float("inf")) -> object:
        solved.append(self.k)
        return group(self, below_s)

    monkeypatch.setattr(Chunking, "group", counted)
    monkeypatch.setattr(Deadline, "elapsed_s", property(lambda self: 2.0 * len(solved)))
    plan = plan_github(1.0)
    verify_plan(plan)
    assert len(solved) == 1
    assert plan.solver.k == solved[0]
    assert plan.solver.status == "feasible"
    assert "deadline of 1 s reached, the best plan of 1 number of slices" in plan.solver.note


def test_a_deadline_that_is_not_reached_changes_nothing() -> None:
    assert plan_github(3600.0).digest() == plan_github(None).digest()


@pytest.mark.parametrize("deadline_s", [0.02, 0.1])
def test_the_deadline_is_exceeded_by_no_more_than_one_candidate(deadline_s: float) -> None:
    plan_github(None)  # OR-Tools is loaded once per process
    started_s = time.perf_counter()
    whole = plan_github(None)
    full_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    plan = plan_github(deadline_s)
    elapsed_s = time.perf_counter() - started_s
    assert whole.solver.note == ""
    # one candidate is at most the whole search; the rest is one greedy plan and its verification
    assert elapsed_s < deadline_s + full_s + 1.0
    verify_plan(plan)


def test_an_auto_deadline_is_the_work_of_the_step() -> None:
    cost = CostModel(LLAMA, A800, LAYOUT)
    settings = PlannerSettings(deadline_s="auto")
    expected = cost.total_time(3000, 1000**2 + 2000**2)
    assert Deadline.of(settings, [1000, 2000], cost).limit_s == pytest.approx(expected)
    assert Deadline.of(PlannerSettings(), [5], cost).limit_s == float("inf")


def test_a_batch_that_cannot_fit_is_an_error_whatever_the_deadline() -> None:
    model = tiny_model(4)
    with pytest.raises(InfeasiblePlanError):
        plan_batch(
            [5000],
            model=model,
            cluster=CLUSTER,
            layout=make_layout(model, 2, 1),
            settings=PlannerSettings(deadline_s=1e-6, memory_limit_gib=0.001),
        )


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("deadline_s", 0.0, "infinipipe.planner.deadline_s is 0.0"),
        ("deadline_s", -1.0, "infinipipe.planner.deadline_s is -1.0"),
        ("solver_time_limit_s", 0.0, "infinipipe.planner.solver_time_limit_s is 0.0"),
        ("max_slices", 0, "infinipipe.planner.max_slices is 0"),
    ],
)
def test_no_time_and_no_slices_are_configuration_errors(
    field: str, value: float, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        InfiniPipeConfig.from_section({"planner": {field: value}})
    assert expected in str(caught.value)
    assert caught.value.exit_code == 2
    with pytest.raises(ValidationError):
        PlannerSettings.model_validate({field: value})
