"""Lean mode: its pieces by hand, and whole plans by property."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from effort import examples
from hypothesis import event, given
from hypothesis import strategies as st
from planner_cases import PLAIN_FLOAT32, plan_with, setup_of, tiny_model

from ds_infinipipe.data.lengths import sample_lengths
from ds_infinipipe.errors import ConfigError, InfeasiblePlanError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.plan.order import backward_order, forward_order
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.ledger import Ledger
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.schedule import shrinking_schedule
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.deadline import Deadline
from ds_infinipipe.planner.search.lean.assemble import lower_bound_s
from ds_infinipipe.planner.search.lean.packing import (
    PackedBatch,
    SortedBatch,
    StreamShape,
    cut_batch,
    pack_batch,
    stage_rates,
)
from ds_infinipipe.planner.search.lean.stream import build_stream, simulate_s, stream_costs
from ds_infinipipe.planner.search.paper.chunking import slice_mesh
from ds_infinipipe.planner.search.what_if.stage_layers import (
    balanced_layers,
    choose_layers,
    with_stage_layers,
)
from ds_infinipipe.planner.verify.frame import verify_plan

GIB = 2**30
LLAMA = BUILTIN_MODELS["llama-13b"]
A800 = BUILTIN_CLUSTERS["a800-80g-4x8"]
LAYOUT = make_layout(LLAMA, 4, 8)
COST = CostModel(setup_of(LLAMA, LAYOUT, A800))
UNLIMITED = 10**9


def github(seed: int, law: str = "github-b") -> list[int]:
    lengths = sample_lengths(law, 512, 65536, np.random.default_rng(seed))
    lengths[0] = 65536
    return lengths.tolist()


def packed(lengths: list[int], k: int, shape: StreamShape | None = None) -> PackedBatch:
    batch = SortedBatch.of(lengths, COST)
    target_s = float(batch.whole_s[0]) / k
    mesh = cut_batch(batch, COST, target_s, UNLIMITED, 32, 8)
    return pack_batch(batch, mesh, stage_rates(COST), target_s, UNLIMITED, shape or StreamShape())


def plan_github(seed: int, memory_gib: float, law: str = "github-b", **knobs: object) -> Plan:
    return plan_with(github(seed, law), LLAMA, LAYOUT, A800, memory_limit_gib=memory_gib, **knobs)


def plan_tiny(lengths: list[int], pp: int = 2, sp: int = 1, **knobs: object) -> Plan:
    model = tiny_model(max(4, pp))
    layout = make_layout(model, pp, sp)
    return plan_with(lengths, model, layout, execution=PLAIN_FLOAT32, loss_block_tokens=16, **knobs)


@pytest.mark.parametrize("unit", [1, 8, 96])
def test_a_sequence_is_cut_where_the_closed_form_mesh_cuts_it(unit: int) -> None:
    batch = SortedBatch.of([65536, 30000], COST)
    mesh = cut_batch(batch, COST, float(batch.whole_s[0]) / 6, UNLIMITED, 32, unit)
    of_first, of_second = mesh.sequence == 0, mesh.sequence == 1
    ends = mesh.start + mesh.length
    assert tuple(ends[of_first]) == slice_mesh(65536, 6, COST, unit)
    assert tuple(ends[of_second]) == slice_mesh(30000, int(of_second.sum()), COST, unit)
    assert mesh.times_s.max() < 1.1 * float(batch.whole_s[0]) / 6


def test_slices_are_cut_finer_until_they_hold_the_token_limit() -> None:
    batch = SortedBatch.of([65536], COST)
    mesh = cut_batch(batch, COST, float(batch.whole_s[0]), 10000, 32, 8)
    assert mesh.length.max() <= 10000
    assert mesh.length.size > 6


def test_short_sequences_lie_beside_slices_that_are_no_tails() -> None:
    chunks = packed(github(0), 5).chunks(8)
    hybrid = [c for c in chunks if c.keeps_kv and len(c.slices) > 1]
    assert any(not c.slices[0].is_tail for c in hybrid)
    assert any(c.slices[0].is_tail for c in hybrid)


def test_every_token_is_packed_once_and_only_the_first_slice_is_cut() -> None:
    lengths = github(1)
    chunks = packed(lengths, 7, StreamShape((0.3,), (0.5,), 1.0)).chunks(8)
    covered = sorted(s for c in chunks for s in ((p.sequence, p.start, p.end) for p in c.slices))
    position = dict.fromkeys(range(len(lengths)), 0)
    for sequence, start, end in covered:
        assert start == position[sequence]
        position[sequence] = end
    assert [position[i] for i in range(len(lengths))] == lengths
    assert all(piece.is_whole for c in chunks for piece in c.slices[1:])
    assert all(c.padded_tokens % 8 == 0 for c in chunks)


@pytest.mark.parametrize("num_sequences", [12, 30, 36, 60, 120])
def test_the_number_of_chunks_does_not_depend_on_the_last_bit_of_a_time(num_sequences: int) -> None:
    """Six sequences fill a chunk, by their times and by their tokens."""
    batch = SortedBatch.of([512] * num_sequences, COST)
    target_s = float(batch.work_s[:6].sum())
    counts = set()
    for moved_s in (np.nextafter(target_s, 0.0), target_s, np.nextafter(target_s, np.inf)):
        mesh = cut_batch(batch, COST, np.inf, 6 * 512, 1, 8)
        shape = StreamShape()
        found = pack_batch(batch, mesh, stage_rates(COST), float(moved_s), 6 * 512, shape)
        counts.add(found.num_chunks)
    assert counts == {num_sequences // 6}


def test_full_chunks_take_about_equal_times() -> None:
    batch = packed(github(0), 6)
    times = stream_costs(batch, COST)
    last_s = (times.forward_s + times.backward_s)[-1]
    assert last_s.max() < 1.1 * last_s.mean()


def test_ramps_start_and_end_with_light_chunks() -> None:
    shape = StreamShape((0.3, 0.6), (0.75, 0.5), 1.0)
    batch = packed(github(0), 5, shape)
    tokens = batch.tokens
    assert tokens[0] < tokens[1] < 0.9 * np.median(tokens[batch.slices == 1])
    assert tokens[-1] < tokens[-2] < tokens[-3]
    # enough full chunks before the first cut sequence for the window to grow
    assert int(np.argmax(batch.slices > 1)) == 2 + 4


def test_without_ramps_orders_and_windows_are_those_of_the_shrinking_schedule() -> None:
    batch = packed(github(0), 5)
    chunks = batch.chunks(8)
    assert forward_order(chunks, range(len(chunks))) == tuple(range(len(chunks)))
    stream = build_stream(batch, 4, 0.0, 0)
    assert tuple(stream.backward) == backward_order(chunks, stream.forward.tolist())
    assert (stream.operations == shrinking_schedule(chunks, 4).operations).all()


@pytest.mark.parametrize("fused", [True, False])
def test_outlines_have_the_bytes_and_times_of_the_chunks(fused: bool) -> None:
    batch = packed(github(2), 5)
    # plain attention's workspace is that of a chunk's longest sequence
    memory = MemoryModel(setup_of(LLAMA, LAYOUT, fused_kernels=fused))
    stream = build_stream(batch, 4, 0.0, 0)
    chunks = batch.chunks(8)
    longest = batch.longest_segments(8)
    assert longest == [chunk.longest_segment for chunk in chunks]
    whole, outlined = Ledger(memory, chunks), Ledger(memory, batch.outlines(8), longest)
    counts = np.random.default_rng(0).integers(0, 11, size=(4, batch.num_chunks))
    assert (whole.peaks(stream, counts) == outlined.peaks(stream, counts)).all()
    costs, exact = stream_costs(batch, COST), COST.chunk_costs(chunks)
    assert np.allclose(costs.forward_s, exact.forward_s, rtol=1e-12)
    assert np.allclose(costs.backward_s, exact.backward_s, rtol=1e-12)


def test_the_lower_bound_is_the_work_of_the_stage_with_the_loss() -> None:
    c = COST.coefficients
    tokens, area = 300, 100**2 + 200**2
    layer_s = (3 * c.linear_s + 2 * c.all2all_s) * tokens
    layer_s += (c.attention_forward_s + c.attention_backward_s) * area
    assert lower_bound_s([100, 200], COST) == pytest.approx(10 * layer_s + 3 * c.logits_s * tokens)


@pytest.mark.parametrize(
    ("law", "most_over_bound"), [("github-a", 0.05), ("github-b", 0.06), ("commoncrawl", 0.08)]
)
def test_plans_are_near_the_lower_bound_with_few_bubbles(law: str, most_over_bound: float) -> None:
    plan = plan_github(3, 72.0, law)
    bound_s = lower_bound_s(plan.lengths, COST)
    assert bound_s < plan.predicted.step_time_s <= (1 + most_over_bound) * bound_s
    assert plan.predicted.bubble_ratio <= 0.06
    assert plan.solver.gap == pytest.approx(1 - bound_s / plan.predicted.step_time_s)


def test_lean_is_a_tenth_faster_than_the_papers_plan() -> None:
    lean, paper = plan_github(0, 72.0), plan_github(0, 72.0, mode="paper")
    assert lean.predicted.step_time_s <= 0.9 * paper.predicted.step_time_s


def test_the_makespan_lp_is_no_slower_than_the_stage_lps() -> None:
    """Before backwards are split, which neither LP foresees."""
    stage = plan_github(0, 30.0, lean_solver="stage", split_backward="never")
    makespan = plan_github(0, 30.0, lean_solver="makespan", split_backward="never")
    assert makespan.predicted.step_time_s < stage.predicted.step_time_s
    for plan in (stage, makespan):
        assert max(plan.predicted.peak_bytes) <= 30 * GIB
        assert any(any(row) for row in plan.pipelines[0].recompute)


def _digest() -> str:
    """Of a plan with slices, packs and solved recomputation, in less time than a whole batch."""
    plan = plan_with(github(2)[:64], LLAMA, LAYOUT, A800, memory_limit_gib=30.0)
    assert any(any(row) for row in plan.pipelines[0].recompute)
    return plan.digest()


def test_equal_input_gives_equal_digests_in_other_processes_too() -> None:
    script = "from test_lean import _digest; print(_digest())"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {sys.path!r}\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert _digest() == _digest() == done.stdout.strip()


def test_a_deadline_already_over_gives_a_plan_that_says_so() -> None:
    plan = plan_github(0, 40.0, deadline_s=1e-9)
    verify_plan(plan)
    assert "deadline of 1e-09 s reached" in plan.solver.note


def test_a_deadline_between_candidates_keeps_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter(range(10**6))
    monkeypatch.setattr(Deadline, "elapsed_s", property(lambda self: 0.001 * next(looks)))
    plan = plan_github(0, 72.0, deadline_s=0.2)
    assert plan.solver.status == "feasible"
    assert "deadline of 0.2 s reached" in plan.solver.note


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recompute_none_and_full_are_kept(recompute: str) -> None:
    plan = plan_tiny([300, 120, 40, 7, 1], recompute=recompute)
    counts = {c for p in plan.pipelines for row in p.recompute for c in row}
    assert counts == {0 if recompute == "none" else 2}


def test_slices_and_tokens_are_limited_by_the_settings() -> None:
    plan = plan_tiny([4000, 30, 20], max_slices=3)
    assert max(p.num_split for p in plan.pipelines) <= 3
    plan = plan_tiny([50] * 40, token_limit=120)
    assert max(chunk.tokens for chunk in plan.chunks) <= 120


def test_many_equal_short_sequences_share_chunks() -> None:
    plan = plan_batch([256] * 512, setup_of(LLAMA, LAYOUT, A800))
    assert 4 <= len(plan.chunks) < 128


def test_large_vocabularies_take_layers_off_the_last_stage() -> None:
    setup = setup_of(replace(LLAMA, vocab_size=128256), LAYOUT, A800)
    balanced = balanced_layers(github(0), setup)
    assert balanced.stage_layers == (10, 10, 11, 9)
    knobs = PlannerSettings(max_slices=6)
    assert choose_layers(github(0), setup, knobs).stage_layers == (10, 10, 11, 9)
    small = balanced_layers(github(0), setup_of(LLAMA, LAYOUT, A800))
    assert small.stage_layers == (10, 10, 10, 10)


@pytest.mark.parametrize("layers", [(10, 10, 20), (10, 10, 10, 9), (40, 0, 0, 0)])
def test_stage_layers_that_cannot_be_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="stage layers"):
        with_stage_layers(LAYOUT, LLAMA, layers)


@given(
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=14),
    pp=st.integers(1, 16),
    sp=st.sampled_from([1, 2, 4]),
    room=st.floats(-5.0, 3.0).map(lambda x: 2.0**x),
    alignment=st.sampled_from([1, 3, 16]),
    recompute=st.sampled_from(["adaptive", "adaptive", "none", "full"]),
    lp=st.sampled_from(["stage", "makespan"]),
    zero_stage=st.sampled_from([0, 3]),
)
@examples(40)
def test_every_batch_is_planned_and_verified_or_declared_infeasible(
    lengths: list[int],
    pp: int,
    sp: int,
    room: float,
    alignment: int,
    recompute: str,
    lp: str,
    zero_stage: int,
) -> None:
    model = replace(tiny_model(max(4, pp)), num_kv_heads=4)
    layout = make_layout(model, pp, sp)
    execution = replace(PLAIN_FLOAT32, zero_stage=zero_stage)
    states = max(MemoryModel(setup_of(model, layout, execution=execution)).static_bytes)
    knobs = {"alignment": alignment, "recompute": recompute, "lean_solver": lp, "max_slices": 8}
    limit_gib = (states + room * 3000 * max(lengths)) / GIB
    knobs |= {"memory_limit_gib": limit_gib, "loss_block_tokens": 16}
    try:
        plan = plan_with(lengths, model, layout, execution=execution, **knobs)
    except InfeasiblePlanError as error:
        assert "the limit is" in str(error)
        event("infeasible")
        return
    event(f"{plan.solver.status}, {len(plan.pipelines)} pipelines")
    verify_plan(plan)
    assert sum(chunk.tokens for chunk in plan.chunks) == sum(lengths)
    assert max(plan.predicted.peak_bytes) <= plan.setup.limit_bytes
    assert lower_bound_s(lengths, CostModel(plan.setup)) <= plan.predicted.step_time_s * (1 + 1e-9)


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=25),
    pp=st.integers(1, 16),
    k=st.integers(1, 12),
    lead=st.sampled_from([(), (0.3, 0.6), (0.1, 0.2, 0.4, 0.8)]),
    growth=st.sampled_from([0.0, 0.3, 1.0, 10.0]),
    extra=st.integers(0, 1),
)
@examples(80)
def test_no_stream_deadlocks_or_leaves_the_window_of_equation_7(
    lengths: list[int], pp: int, k: int, lead: tuple[float, ...], growth: float, extra: int
) -> None:
    batch = packed(lengths, k, StreamShape(lead, lead[::-1], growth))
    stream = build_stream(batch, pp, growth, extra)
    layout = make_layout(tiny_model(pp), pp, 1)
    cost = CostModel(setup_of(tiny_model(pp), layout, execution=PLAIN_FLOAT32))
    assert simulate_s(stream, stream_costs(batch, cost)) >= 0.0  # raises where it deadlocks
    in_flight = np.cumsum(np.where(stream.operations >= 0, 1, -1), axis=1).max(axis=1)
    assert (in_flight <= np.arange(pp - 1, -1, -1) + batch.slices.max()).all()
