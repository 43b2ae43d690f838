"""plan_batch end to end: every plan verifies or says why there is none."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from hypothesis import event, given
from hypothesis import strategies as st
from planner_cases import (
    PLAIN_FLOAT32,
    plan_with,
    setup_of,
    tiny_model,
    tiny_setup,
)

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import DataError, InfeasiblePlanError, ScheduleError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS, ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout, make_setup
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.search import batch
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.paper.chunkings import Chunking
from ds_infinipipe.planner.verify.frame import peak_bytes_by_stage, verify_plan

GIB = 2**30
LLAMA = BUILTIN_MODELS["llama-13b"]
A800 = BUILTIN_CLUSTERS["a800-80g-4x8"]


def plan_tiny(
    lengths: list[int], pp: int = 2, sp: int = 1, limit_bytes: int | None = None, **knobs: object
) -> Plan:
    model = tiny_model(4)
    if limit_bytes is not None:
        knobs["memory_limit_gib"] = limit_bytes / GIB
    knobs = {"mode": "paper", "loss_block_tokens": 16, **knobs}
    return plan_with(lengths, model, make_layout(model, pp, sp), execution=PLAIN_FLOAT32, **knobs)


def plan_github(seed: int, memory_gib: float, law: str = "github-b", **knobs: object) -> Plan:
    lengths = sample_lengths(law, 512, 65536, np.random.default_rng(seed))
    lengths[0] = 65536
    knobs = {"mode": "paper", "memory_limit_gib": memory_gib, **knobs}
    return plan_with(lengths.tolist(), LLAMA, make_layout(LLAMA, 4, 8), A800, **knobs)


shared_github = functools.cache(plan_github)
"""The same, planned once for all tests."""


def recomputed(plan: Plan) -> int:
    return sum(sum(row) for pipeline in plan.pipelines for row in pipeline.recompute)


@pytest.mark.parametrize("law", ["github-a", "github-b"])
@pytest.mark.parametrize("memory_gib", [72.0, 40.0, 20.0])
def test_github_batches_give_verified_plans_within_the_limit(law: str, memory_gib: float) -> None:
    plan = shared_github(0, memory_gib, law)
    verify_plan(plan)
    assert max(peak_bytes_by_stage(plan)) <= memory_gib * GIB
    assert plan.predicted.peak_bytes == peak_bytes_by_stage(plan)
    assert 0.0 < plan.predicted.bubble_ratio < 0.3
    assert plan.solver.status == "optimal"
    assert plan.solver.gap <= 0.02


def test_less_memory_recomputes_more_and_takes_longer() -> None:
    plans = [shared_github(0, memory_gib, "github-b") for memory_gib in (72.0, 30.0, 20.0)]
    assert [recomputed(plans[0]) == 0, recomputed(plans[1]) > 0] == [True, True]
    assert recomputed(plans[2]) > recomputed(plans[1])
    times = [plan.predicted.step_time_s for plan in plans]
    assert times == sorted(times)


def test_512_lengths_are_grouped_for_few_numbers_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work that planning time goes with; times are in benchmarks/plan_speed.py."""
    solved: list[int] = []
    group = Chunking.group

    def counted(self: Chunking, below_s: float = float("inf")) -> object:
        solved.append(self.k)
        return group(self, below_s)

    monkeypatch.setattr(Chunking, "group", counted)
    assert max(plan_github(0, 72.0).predicted.peak_bytes) <= 72 * GIB
    assert len(solved) == 1  # the bounds of all others are above what it found
    solved.clear()
    assert max(plan_github(0, 40.0).predicted.peak_bytes) <= 40 * GIB
    assert len(solved) == len(set(solved)) <= 8


def test_equal_input_gives_equal_digests() -> None:
    first, second = shared_github(0, 30.0, "github-b"), plan_github(0, 30.0)
    assert recomputed(first) > 0
    assert first.digest() == second.digest()


def test_a_plan_survives_its_json_form() -> None:
    plan = plan_tiny([300, 120, 40, 7, 1])
    assert Plan.from_json(plan.to_json()) == plan


def test_lengths_may_be_a_numpy_array() -> None:
    lengths = np.array([90, 30, 8])
    plan = plan_batch(lengths, tiny_setup(4, 2))
    assert plan.lengths == (90, 30, 8)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "the batch is empty"),
        ([5, 0, 3], "sequence 1 of the batch has length 0"),
        ([5, 3, -2], "sequence 2 of the batch has length -2"),
        ([2.5], "sequence 0 of the batch has length 2.5"),
    ],
)
def test_unusable_lengths_are_named(lengths: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        plan_tiny(lengths)


def test_a_sequence_that_cannot_fit_is_named_with_stage_bytes_limit_and_repair() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_batch(
            [100, 4_000_000, 50],
            make_setup(LLAMA, A800, make_layout(LLAMA, 4, 8), memory_limit_gib=40.0),
            PlannerSettings(mode="paper"),
        )
    text = str(caught.value)
    assert text.startswith("sequence 1 of 4000000 tokens, ")
    for part in (
        "GiB on stage ",
        "with all 10 layers recomputed",
        "the limit is 40.00 GiB",
        "larger memory limit",
        "sp is 8",
        "pp is 4",
    ):
        assert part in text
    # the gradients of K and V outweigh what finer slices save: one chunk needs least
    assert "in one chunk" in text
    assert "more slices" not in text


def test_more_slices_are_proposed_where_the_finest_need_least() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_tiny([3000, 30, 20], limit_bytes=2**20, max_slices=4)
    text = str(caught.value)
    assert text.startswith("sequence 0 of 3000 tokens, cut into 4 slices, needs ")
    assert "use more slices (max_slices above 4)" in text


def test_the_bytes_in_the_error_are_the_limit_that_would_do() -> None:
    lengths = [4000, 30, 20]
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_tiny(lengths, limit_bytes=2**20)
    need = float(str(caught.value).split(" needs ")[1].split()[0])
    unit = GIB if " GiB on stage" in str(caught.value) else 2**20
    assert "sequence 0 of 4000 tokens" in str(caught.value)
    verify_plan(plan_tiny(lengths, limit_bytes=int(need * unit * 1.01)))
    with pytest.raises(InfeasiblePlanError):
        plan_tiny(lengths, limit_bytes=int(need * unit * 0.99))


def test_model_states_above_the_limit_are_named() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"stage 0 needs 8\.\d+ GiB for the parameters"):
        plan_github(0, 5.0)


def test_recompute_none_names_what_it_would_need() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"none of its layers.*recompute 'adaptive'"):
        plan_github(0, 12.0, recompute="none")


def test_recompute_full_takes_every_layer_of_every_chunk() -> None:
    plan = plan_tiny([300, 120, 40, 7, 1], recompute="full")
    assert recomputed(plan) == 4 * len(plan.chunks)


def test_greedy_needs_no_solver_and_fits() -> None:
    plan = plan_github(0, 30.0, solver="greedy")
    assert plan.solver.status == "feasible"
    for pipeline in plan.pipelines:
        assert len({count for row in pipeline.recompute for count in row}) == 1
    assert recomputed(plan) > recomputed(shared_github(0, 30.0, "github-b"))


def test_slices_are_limited_by_max_slices() -> None:
    plan = plan_tiny([4000, 30, 20], max_slices=3)
    assert plan.solver.k <= 3
    assert max(pipeline.num_split for pipeline in plan.pipelines) <= 3


def test_chunks_hold_at_most_the_token_limit() -> None:
    lengths = [50] * 40
    assert max(chunk.tokens for chunk in plan_tiny(lengths, token_limit=120).chunks) <= 120
    assert max(chunk.tokens for chunk in plan_tiny(lengths, token_limit=400).chunks) > 120


def test_one_sequence_of_one_token_is_a_plan() -> None:
    plan = plan_tiny([1], pp=4, sp=2)
    verify_plan(plan)
    assert len(plan.chunks) == 1


def test_equal_sequences_are_parted_where_they_do_not_fit_together() -> None:
    lengths = [2000] * 6
    fitting = plan_tiny(lengths, max_slices=2)
    least = max(fitting.predicted.peak_bytes)
    plan = None
    for limit_bytes in range(least, 0, -least // 50):
        try:
            plan = plan_tiny(lengths, limit_bytes=limit_bytes, max_slices=2)
        except InfeasiblePlanError:
            break
        if plan.solver.note:
            break
    assert plan is not None
    assert "parted" in plan.solver.note
    assert len(plan.pipelines) > 1
    verify_plan(plan)


def test_the_plan_is_verified_before_it_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "lower_plan", lambda *_: ((), ()))
    with pytest.raises(ScheduleError):
        plan_tiny([300, 120])


@given(
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=12),
    layers=st.integers(1, 5),
    pp=st.integers(1, 4),
    sp=st.sampled_from([1, 2, 4]),
    room=st.floats(-5.0, 3.0).map(lambda x: 2.0**x),
    alignment=st.sampled_from([1, 3, 16]),
    solver=st.sampled_from(["cpsat", "greedy"]),
    recompute=st.sampled_from(["adaptive", "adaptive", "none", "full"]),
    zero_stage=st.sampled_from([0, 3]),
)
@examples(150)
def test_every_batch_is_planned_and_verified_or_declared_infeasible(
    lengths: list[int],
    layers: int,
    pp: int,
    sp: int,
    room: float,
    alignment: int,
    solver: str,
    recompute: str,
    zero_stage: int,
) -> None:
    model: ModelSpec = replace(tiny_model(max(layers, pp)), num_kv_heads=4)
    layout = make_layout(model, pp, sp)
    execution = replace(PLAIN_FLOAT32, zero_stage=zero_stage)
    states = max(MemoryModel(setup_of(model, layout, execution=execution)).static_bytes)
    limit_gib = (states + room * 3000 * max(lengths)) / GIB
    knobs = {"mode": "paper", "alignment": alignment, "solver": solver, "recompute": recompute}
    knobs |= {"memory_limit_gib": limit_gib, "loss_block_tokens": 16}
    try:
        plan = plan_with(lengths, model, layout, execution=execution, **knobs)
    except InfeasiblePlanError as error:
        assert "the limit is" in str(error)
        event("infeasible")
        return
    event("parted" if plan.solver.note else "grouped")
    event("one pipeline" if len(plan.pipelines) == 1 else "several pipelines")
    event("recomputes" if recomputed(plan) else "recomputes nothing")
    verify_plan(plan)
    assert sum(chunk.tokens for chunk in plan.chunks) == sum(lengths)
    assert max(peak_bytes_by_stage(plan)) <= plan.setup.limit_bytes


def test_parameters_are_kept_gathered_where_that_is_faster_and_fits() -> None:
    model = replace(BUILTIN_MODELS["llama-7b"], num_layers=8)
    slow = replace(BUILTIN_CLUSTERS["a800-80g-4x8"], gather_bandwidth=10e9)
    layout = make_layout(model, 2, 4)
    lengths = [3000, 2500, 900, 800] * 4

    def planned(gather: str, limit_gib: float = 60.0) -> Plan:
        knobs = {"gather": gather, "token_limit": 4000, "split_backward": "never"}
        return plan_with(lengths, model, layout, slow, memory_limit_gib=limit_gib, **knobs)

    chunk, step, auto = (planned(gather) for gather in ("chunk", "step", "auto"))
    assert [p.setup.execution.keeps_gathered for p in (chunk, step, auto)] == [False, True, True]
    assert auto.predicted == step.predicted
    assert step.predicted.step_time_s < 0.9 * chunk.predicted.step_time_s
    need = max(chunk.predicted.peak_bytes)
    assert max(step.predicted.peak_bytes) > need
    tight = planned("auto", need / 2**30)
    assert not tight.setup.execution.keeps_gathered
    assert tight.digest() == planned("chunk", need / 2**30).digest()


def test_what_a_setup_says_of_gathers_does_not_count() -> None:
    setup = tiny_setup(4, 2, 2)
    plans = [plan_batch([300, 120], setup.run_with(keeps_gathered=k)) for k in (False, True)]
    assert plans[0].digest() == plans[1].digest()


@pytest.mark.parametrize(("sp", "zero_stage"), [(1, 3), (4, 0)])
def test_nothing_is_kept_where_nothing_is_gathered(sp: int, zero_stage: int) -> None:
    model = replace(BUILTIN_MODELS["llama-7b"], num_layers=4)
    setup = setup_of(model, make_layout(model, 2, sp), A800, zero_stage=zero_stage)
    plan = plan_batch([500, 300], setup, PlannerSettings(gather="step"))
    assert not plan.setup.execution.keeps_gathered
