"""Planning ends at its deadline with a plan that says so."""

from __future__ import annotations

import numpy as np
import pytest
from planner_cases import plan_with, setup_of, tiny_setup
from pydantic import ValidationError

from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import ConfigError, InfeasiblePlanError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.deadline import Deadline
from ds_infinipipe.planner.search.paper.chunkings import Chunking
from ds_infinipipe.planner.verify.frame import verify_plan

LLAMA = BUILTIN_MODELS["llama-13b"]
A800 = BUILTIN_CLUSTERS["a800-80g-4x8"]
LAYOUT = make_layout(LLAMA, 4, 8)


def plan_github(deadline_s: float | str | None, memory_gib: float = 25.0) -> Plan:
    lengths = sample_lengths("github-b", 256, 65536, np.random.default_rng(3))
    knobs = {"mode": "paper", "deadline_s": deadline_s, "memory_limit_gib": memory_gib}
    return plan_with(lengths.tolist(), LLAMA, LAYOUT, A800, **knobs)


def test_without_time_for_any_solve_a_greedy_plan_is_returned_and_says_so() -> None:
    plan = plan_github(1e-6)
    verify_plan(plan)
    assert plan.solver.status == "fallback"
    assert plan.solver.note == "deadline of 1e-06 s reached before any plan, a greedy one is taken"


@pytest.mark.parametrize("count", [1, 2])
def test_the_deadline_is_exceeded_by_no_more_than_one_candidate(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    solved: list[int] = []
    group = Chunking.group

    def counted(self: Chunking, below_s: float = float("inf")) -> object:
        solved.append(self.k)
        return group(self, below_s)

    monkeypatch.setattr(Chunking, "group", counted)
    monkeypatch.setattr(Deadline, "elapsed_s", property(lambda self: 2.0 * len(solved)))
    deadline_s = 2 * count - 1
    plan = plan_github(deadline_s)
    verify_plan(plan)
    assert len(solved) == count
    assert plan.solver.k in solved
    assert plan.solver.status == "feasible"
    best = f"the best plan of {count} number{'s' if count > 1 else ''} of slices"
    assert f"deadline of {deadline_s} s reached, {best}" in plan.solver.note


def test_a_deadline_that_is_not_reached_changes_nothing() -> None:
    assert plan_github(3600.0).digest() == plan_github(None).digest()


def test_an_auto_deadline_is_the_work_of_the_step() -> None:
    cost = CostModel(setup_of(LLAMA, LAYOUT, A800))
    settings = PlannerSettings(deadline_s="auto")
    expected = cost.total_time(3000, 1000**2 + 2000**2)
    assert Deadline.of(settings, [1000, 2000], cost).limit_s == pytest.approx(expected)
    assert Deadline.of(PlannerSettings(), [5], cost).limit_s == float("inf")


def test_a_batch_that_cannot_fit_is_an_error_whatever_the_deadline() -> None:
    setup = tiny_setup(4, 2, limit_bytes=2**20)
    with pytest.raises(InfeasiblePlanError):
        plan_batch([5000], setup, PlannerSettings(deadline_s=1e-6))


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
