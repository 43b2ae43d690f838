"""Compiled schedules and memory scans against the readable ones, up to 16 stages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from handmade import packed, tiny_model, with_prediction
from hypothesis import given
from hypothesis import strategies as st
from oracles.orders import pipeline_operations, stage_operations
from oracles.peak_bytes import peak_bytes
from oracles.simulate import simulate
from oracles.transfers import transfer_bytes
from planner_cases import setup_of

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.facts.setup import Layout, Setup, make_layout
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.lower import lower_plan
from ds_infinipipe.planner.plan.order import (
    backward_order,
    count_slices,
    forward_order,
    shrinking_windows,
    slices_by_position,
    split_backwards,
    static_windows,
)
from ds_infinipipe.planner.plan.plan import PipelinePlan, Plan, Prediction, SolverStats
from ds_infinipipe.planner.plan.stream import NOTHING, Instruction, Op
from ds_infinipipe.planner.predict.ledger import Ledger, StageRows
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.predict.schedule import (
    ScheduleArrays,
    build_schedule,
    decode,
    encode,
    join_schedules,
    pipeline_counts,
    pipeline_schedule,
    shrinking_schedule,
    simulate_schedule,
    static_schedule,
    stream_schedule,
)
from ds_infinipipe.planner.predict.simulate import forecast_streams
from ds_infinipipe.planner.predict.time import ChunkCosts
from ds_infinipipe.planner.verify.frame import peak_bytes_by_stage, verify_plan

PACKAGE = Path(__file__).resolve().parents[3] / "ds_infinipipe"
SCHEDULES = (static_schedule, shrinking_schedule)
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Batch:
    """Chunks of a batch, some with shorts beside a slice, and where they run."""

    lengths: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    setup: Setup

    @property
    def layout(self) -> Layout:
        return self.setup.layout

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.pp, len(self.chunks)

    def random_counts(self, seed: int) -> np.ndarray:
        """Recomputed layers [pp, chunks]; a third of them none, a third all."""
        rng = np.random.default_rng(seed)
        layers = np.array(self.layout.stage_layers)[:, None]
        free = rng.integers(0, layers + 1, self.shape)
        extent = rng.integers(0, 3, self.shape)
        return np.where(extent == 0, 0, np.where(extent == 1, layers, free))

    def random_costs(self, seed: int) -> ChunkCosts:
        rng = np.random.default_rng(seed)
        n = len(self.chunks)
        return ChunkCosts(
            rng.uniform(0.1, 2.0, self.shape),
            rng.uniform(0.1, 4.0, self.shape),
            rng.uniform(0.0, 1.0, n),
            rng.uniform(0.0, 0.5, n),
            rng.uniform(0.1, 2.0, self.shape),
            rng.uniform(0.1, 2.0, self.shape),
        )


@st.composite
def batches(draw: st.DrawFn, max_pp: int = 16, max_sequences: int = 8) -> Batch:
    pp, sp = draw(st.integers(1, max_pp)), draw(st.sampled_from([1, 2]))
    lengths: list[int] = []
    chunks: list[Chunk] = []
    for _ in range(draw(st.integers(1, max_sequences))):
        pieces = [2 * n for n in draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))]
        pieces[-1] -= draw(st.integers(0, 1))
        sequence = len(lengths)
        lengths.append(sum(pieces))
        for index, piece in enumerate(pieces):
            start = sum(pieces[:index])
            slices = [Slice(sequence, start, piece, index == len(pieces) - 1)]
            if draw(st.booleans()):
                slices.append(Slice(len(lengths), 0, draw(st.integers(1, 9)), True))
                lengths.append(slices[-1].length)
            chunks.append(packed(sp, *slices))
    model = tiny_model(pp * draw(st.integers(1, 3)))
    order = draw(st.permutations(range(len(chunks))))
    shuffled = tuple(chunks[i] for i in order)
    setup = setup_of(model, make_layout(model, pp, sp), dtype_bytes=4)
    return Batch(tuple(lengths), shuffled, setup)


def orders_of(chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    forward = forward_order(chunks, range(len(chunks)))
    return forward, backward_order(chunks, forward)


def split_randomly(schedule: ScheduleArrays, seed: int) -> ScheduleArrays:
    """Some backwards of each stage as I and W, up to a stage's length apart."""
    rng = np.random.default_rng(seed)
    rows = []
    for operations in schedule.as_operations():
        share, most = rng.random(), int(rng.choice([1, 4, len(operations)]))
        chunks = [k for op, k in operations if op is Op.BACKWARD and rng.random() < share]
        delays = {k: int(rng.integers(0, most)) for k in chunks}
        rows.append([encode(op, k) for op, k in split_backwards(operations, delays)])
    length = max(len(row) for row in rows)
    padded = [row + [NOTHING] * (length - len(row)) for row in rows]
    return replace(schedule, operations=np.array(padded, dtype=np.int64))


def plan_of(batch: Batch, schedules: Sequence[ScheduleArrays], counts: np.ndarray) -> Plan:
    """A plan that runs these pipelines one after the other, with what it predicts filled in."""
    pipelines = tuple(
        PipelinePlan(
            tuple(s.forward.tolist()),
            tuple(s.backward.tolist()),
            tuple(tuple(row) for row in counts[:, s.forward].tolist()),
            count_slices(batch.chunks, s.forward.tolist()),
        )
        for s in schedules
    )
    operations = join_schedules(schedules).as_operations()
    plan = Plan(
        setup=batch.setup,
        lengths=batch.lengths,
        chunks=batch.chunks,
        pipelines=pipelines,
        streams=lower_plan(pipelines, batch.chunks, batch.layout, operations),
        predicted=Prediction(0.0, 0.0, (0,) * batch.layout.pp),
        solver=SolverStats("test", 1, "feasible", 0.0, 0.0),
    )
    return with_prediction(plan)


@given(batch=batches(), extra=st.integers(0, 2))
@examples(100)
def test_operations_are_those_of_the_readable_loop(batch: Batch, extra: int) -> None:
    forward, backward = orders_of(batch.chunks)
    pp, n = batch.shape
    both = (
        (static_schedule, static_windows(pp, n, count_slices(batch.chunks, forward), extra)),
        (
            shrinking_schedule,
            shrinking_windows(pp, slices_by_position(batch.chunks, backward), extra),
        ),
    )
    for make, windows in both:
        operations = make(batch.chunks, pp, extra=extra).as_operations()
        for stage in range(pp):
            assert operations[stage] == stage_operations(forward, backward, windows[stage])


def test_shrinking_windows_follow_the_sequences_still_to_come() -> None:
    # sequences of 3 and 2 slices, then two batched chunks
    assert shrinking_windows(3, (3, 3, 3, 2, 2, 1, 1)) == (
        (5, 5, 5, 4, 4, 3, 3),
        (4, 4, 4, 3, 3, 2, 2),
        (3, 3, 3, 2, 2, 1, 1),
    )
    assert shrinking_windows(1, (1, 2, 2, 1), extra=1) == ((3, 3, 3, 2),)


def test_a_shrinking_window_by_hand() -> None:
    chunks = [
        packed(1, Slice(0, 0, 4, False)),
        packed(1, Slice(0, 4, 4, True)),
        *(packed(1, Slice(i, 0, 5 - i, True)) for i in (1, 2, 3)),
    ]
    shrinking, static = shrinking_schedule(chunks, 1), static_schedule(chunks, 1)
    # B of the slices with two chunks ahead, of the others with one
    assert shrinking.operations.tolist() == [[0, 1, -2, 2, -1, -3, 3, -4, 4, -5]]
    assert static.operations.tolist() == [[0, 1, -2, 2, -1, 3, -3, 4, -4, -5]]


@given(batch=batches(), seed=seeds, cut=st.floats(0.0, 1.0))
@examples(100)
def test_simulation_equals_the_walk_over_lowered_streams(
    batch: Batch, seed: int, cut: float
) -> None:
    costs, counts = batch.random_costs(seed), batch.random_counts(seed)
    forward, _ = orders_of(batch.chunks)
    heads = [i for i, c in enumerate(forward) if batch.chunks[c].context_len == 0]
    border = heads[int(cut * (len(heads) - 1))]
    for make in SCHEDULES:
        groups = [group for group in (forward[:border], forward[border:]) if group]
        parts = [make(batch.chunks, batch.layout.pp, group) for group in groups]
        plan = plan_of(batch, parts, counts)
        expected = simulate(plan.streams, **vars(costs))
        simulated = simulate_schedule(join_schedules(parts), costs, counts)
        assert simulated.makespan_s == expected.makespan_s
        assert simulated.timeline().spans == expected.spans
        assert simulated.timeline().busy_s == pytest.approx(expected.busy_s, rel=1e-12)
        assert simulated.bubble_ratio == pytest.approx(expected.bubble_ratio, abs=1e-12)


@given(batch=batches(), seed=seeds)
@examples(100)
def test_split_backwards_simulate_and_peak_as_the_readable_ones(batch: Batch, seed: int) -> None:
    costs, counts = batch.random_costs(seed), batch.random_counts(seed)
    memory = MemoryModel(batch.setup)
    schedule = split_randomly(shrinking_schedule(batch.chunks, batch.layout.pp), seed)
    plan = plan_of(batch, [schedule], counts)
    verify_plan(plan)
    expected = simulate(plan.streams, **vars(costs))
    assert forecast_streams(plan.streams, costs).spans == expected.spans
    simulated = simulate_schedule(schedule, costs, counts)
    assert simulated.makespan_s == expected.makespan_s
    assert simulated.timeline().spans == expected.spans
    assert simulated.timeline().busy_s == pytest.approx(expected.busy_s, rel=1e-12)
    for recompute in (counts, 0 * counts):
        peaks = Ledger(memory, batch.chunks).peaks(schedule, recompute).tolist()
        assert peaks == list(peak_bytes_by_stage(plan_of(batch, [schedule], recompute)))
        assert peaks == _readable_peaks(memory, schedule, batch.chunks, recompute)


def _readable_peaks(
    memory: MemoryModel, schedule: ScheduleArrays, chunks: Sequence[Chunk], counts: np.ndarray
) -> list[int]:
    operations = schedule.as_operations()
    transfers = transfer_bytes(operations, [memory.input_bytes(chunk) for chunk in chunks])
    found = Ledger(memory, chunks).transfers(schedule)
    for row, expected in zip(found.tolist(), transfers, strict=True):
        assert row[: len(expected)] == list(expected)
    return [
        peak_bytes(memory, stage, row, chunks, counts[stage], transfers[stage])
        for stage, row in enumerate(operations)
    ]


@given(batch=batches(), seed=seeds, cut=st.floats(0.0, 1.0))
@examples(50)
def test_pipelines_run_one_after_the_other_as_the_readable_loop_has_them(
    batch: Batch, seed: int, cut: float
) -> None:
    counts, pp = batch.random_counts(seed), batch.layout.pp
    forward, _ = orders_of(batch.chunks)
    heads = [i for i, c in enumerate(forward) if batch.chunks[c].context_len == 0]
    border = heads[int(cut * (len(heads) - 1))]
    groups = [group for group in (forward[:border], forward[border:]) if group]
    plan = plan_of(batch, [static_schedule(batch.chunks, pp, group) for group in groups], counts)
    schedule = pipeline_schedule(plan.pipelines, pp)
    assert schedule.as_operations() == pipeline_operations(plan.pipelines, pp)
    assert (pipeline_counts(plan.pipelines, batch.shape) == counts).all()


@given(batch=batches(), seed=seeds)
@examples(50)
def test_streams_name_their_operations_and_counts(batch: Batch, seed: int) -> None:
    counts = batch.random_counts(seed)
    schedule = split_randomly(shrinking_schedule(batch.chunks, batch.layout.pp), seed)
    streams = plan_of(batch, [schedule], counts).streams
    found, layers = stream_schedule(streams, len(batch.chunks))
    for name in ("operations", "forward", "backward"):
        assert getattr(found, name).tolist() == getattr(schedule, name).tolist()
    assert layers.tolist() == counts.tolist()


@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT])
def test_a_code_names_its_operation(op: Op) -> None:
    assert [decode(encode(op, chunk)) for chunk in (0, 7)] == [(op, 0), (op, 7)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 F1 SEND_F0 SEND_F1 STEP", "stage 0: SEND_F0 comes late, after F1"),
        ("F0 I0 W0 SEND_B0 STEP", "stage 0: SEND_B0 comes late, after W0"),
        ("SEND_F0 F0 STEP", "stage 0: SEND_F0 comes late, after STEP"),
    ],
)
def test_a_send_that_does_not_follow_what_it_sends_has_no_forecast(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        stream_schedule([[Instruction.parse(word) for word in text.split()]], 2)


def test_simulation_without_counts_recomputes_nothing() -> None:
    chunks = [packed(1, Slice(i, 0, 4, True)) for i in range(4)]
    unit = ChunkCosts(np.ones((2, 4)), np.full((2, 4), 2.0), np.ones(4), np.zeros(4))
    schedule = static_schedule(chunks, 2)
    assert simulate_schedule(schedule, unit).makespan_s == (4 + 2 - 1) * 3.0
    counts = np.zeros((2, 4), dtype=np.int64)
    counts[1, 2] = 3
    assert simulate_schedule(schedule, unit, counts).makespan_s == 15.0 + 3.0


@given(batch=batches(), seed=seeds)
@examples(100)
def test_peaks_equal_the_memory_model_and_the_verifiers_walk(batch: Batch, seed: int) -> None:
    memory = MemoryModel(batch.setup)
    ledger = Ledger(memory, batch.chunks)
    for counts in (batch.random_counts(seed), np.zeros(batch.shape, dtype=np.int64)):
        for make in SCHEDULES:
            schedule = make(batch.chunks, batch.layout.pp)
            peaks = ledger.peaks(schedule, counts).tolist()
            assert peaks == _readable_peaks(memory, schedule, batch.chunks, counts)
            assert peaks == list(peak_bytes_by_stage(plan_of(batch, [schedule], counts)))
            if not counts.any():
                assert peaks == ledger.peaks(schedule).tolist()


@given(batch=batches(), seed=seeds)
@examples(100)
def test_the_verifier_accepts_shrinking_windows(batch: Batch, seed: int) -> None:
    schedule = shrinking_schedule(batch.chunks, batch.layout.pp)
    verify_plan(plan_of(batch, [schedule], batch.random_counts(seed)))


@given(batch=batches())
@examples(100)
def test_shrinking_windows_never_need_more_memory_but_for_transfers(batch: Batch) -> None:
    memory, nothing = MemoryModel(batch.setup), [0] * len(batch.chunks)
    static, shrinking = (make(batch.chunks, batch.layout.pp).as_operations() for make in SCHEDULES)
    for stage, (before, after) in enumerate(zip(static, shrinking, strict=True)):
        peaks = [peak_bytes(memory, stage, o, batch.chunks, nothing) for o in (before, after)]
        assert peaks[1] <= peaks[0]


@given(batch=batches(), seed=seeds, share=st.floats(0.0, 1.0))
@examples(100)
def test_counts_that_keep_the_rows_fit(batch: Batch, seed: int, share: float) -> None:
    ledger = Ledger(MemoryModel(batch.setup), batch.chunks)
    schedule = shrinking_schedule(batch.chunks, batch.layout.pp)
    counts, full = batch.random_counts(seed), all_layers(ledger)
    least, most = int(ledger.peaks(schedule, full).max()), int(ledger.peaks(schedule).max())
    limit = round(least + share * (most - least))
    rows = ledger.rows(schedule, limit)
    assert rows is not None
    for stage, part in enumerate(rows):
        if holds(part, counts[stage], ledger.saving):
            assert ledger.peaks(schedule, counts)[stage] <= limit
    assert all(holds(part, full[p], ledger.saving) for p, part in enumerate(rows))
    assert ledger.rows(schedule, least - 1) is None


def all_layers(ledger: Ledger) -> np.ndarray:
    return ledger.layers[:, None] + np.zeros(ledger.shape, dtype=np.int64)


def holds(rows: StageRows, counts: np.ndarray, saving: np.ndarray) -> bool:
    saved = np.concatenate([[0], np.cumsum((saving * counts)[rows.chunks])])
    return bool((saved[rows.offsets[1:]] - saved[rows.offsets[:-1]] >= rows.need).all())


@given(batch=batches(), share=st.floats(0.0, 1.0))
@examples(100)
def test_every_row_holds_the_chunks_between_their_forward_and_backward(
    batch: Batch, share: float
) -> None:
    ledger = Ledger(MemoryModel(batch.setup), batch.chunks)
    schedule = shrinking_schedule(batch.chunks, batch.layout.pp)
    full = all_layers(ledger)
    least, most = int(ledger.peaks(schedule, full).max()), int(ledger.peaks(schedule).max())
    limit = round(least + share * (most - least))
    rows = ledger.rows(schedule, limit)
    assert rows is not None
    for part, moments, operations in zip(
        rows, ledger.moments(schedule), schedule.as_operations(), strict=True
    ):
        selected = moments.binding(limit, ledger.saving)
        assert selected is not None
        need, keeps = selected
        live: list[int] = []
        expected = []
        for moment, (op, chunk) in enumerate(operations):
            if op is Op.FORWARD:
                live.append(chunk)
            assert moments.live_saving[moment] == sum(ledger.saving[live])
            if keeps[moment]:
                expected.append((int(need[moment]), tuple(live)))
            if op is Op.BACKWARD:
                live.remove(chunk)
        found = [
            (int(part.need[i]), tuple(part.chunks[part.offsets[i] : part.offsets[i + 1]].tolist()))
            for i in range(part.need.size)
        ]
        assert found == expected


def test_a_window_below_the_slices_of_a_sequence_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 1: a window of 2 chunks reaches B2 before F2"):
        build_schedule((0, 1, 2), (2, 1, 0), ((3, 3, 3), (2, 2, 2)))


def test_a_first_stage_with_too_small_a_window_deadlocks() -> None:
    """Stage 0 waits for B0 before F2, which stage 1 needs before it can send anything back."""
    schedule = build_schedule((0, 1, 2), (2, 1, 0), ((3, 3, 3), (3, 3, 3)))
    late = np.array([[0, 1, -2, 2, -3, -1], [0, 1, 2, -3, -2, -1]])
    costs = ChunkCosts(np.ones((2, 3)), np.ones((2, 3)), np.zeros(3), np.zeros(3))
    assert simulate_schedule(schedule, costs).makespan_s > 0
    with pytest.raises(ScheduleError, match=r"deadlock with 2 stages stuck: stage 0 waits at B1"):
        simulate_schedule(replace(schedule, operations=late), costs)


@pytest.mark.parametrize(
    ("forward", "backward", "windows", "message"),
    [
        ((0, 1), (1, 2), ((2, 2),), "must name the same chunks"),
        ((0, 0), (0, 0), ((2, 2),), "names each chunk once"),
        ((-1, 0), (0, -1), ((2, 2),), "an id of at least 0"),
        ((0, 1), (0, 1), ((2, 2, 2),), r"windows of shape \(1, 3\) do not fit 2 chunks"),
    ],
)
def test_orders_that_are_none_are_refused(
    forward: tuple[int, ...],
    backward: tuple[int, ...],
    windows: tuple[tuple[int, ...], ...],
    message: str,
) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(forward, backward, windows)


def test_arrays_of_other_shapes_are_refused() -> None:
    chunks = [packed(1, Slice(i, 0, 4, True)) for i in range(3)]
    schedule = static_schedule(chunks, 2)
    costs = ChunkCosts(np.ones((2, 3)), np.ones((2, 3)), np.zeros(3), np.zeros(3))
    with pytest.raises(ScheduleError, match=r"backward times have shape \(2, 2\)"):
        simulate_schedule(schedule, replace(costs, backward_s=np.ones((2, 2))))
    with pytest.raises(ScheduleError, match="name chunk 2, but there are times of 2"):
        simulate_schedule(schedule, replace(costs, p2p_s=np.zeros(2)))
    with pytest.raises(ScheduleError, match="recompute counts have shape"):
        simulate_schedule(schedule, costs, np.zeros((3, 3), dtype=np.int64))
    model = tiny_model(2)
    ledger = Ledger(MemoryModel(setup_of(model, make_layout(model, 2, 1))), chunks[:2])
    with pytest.raises(ScheduleError, match="2 stages and at least 3 chunks"):
        ledger.peaks(schedule)


def run_python(code: str, root: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_numba_is_loaded_only_when_a_kernel_is_called() -> None:
    code = (
        "import sys, ds_infinipipe.planner.search.batch, ds_infinipipe.planner.predict.ledger as m;"
        "print('numba' in sys.modules);"
        "import ds_infinipipe.planner.predict.schedule as s; s.load_kernels();"
        "print('numba' in sys.modules)"
    )
    assert run_python(code, PACKAGE.parent).split() == ["False", "True"]


def test_kernels_compile_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """No folder beside the source and none below home can be made: both paths are files.

    One kernel of two lines stands for all: the decorator is the same, and each takes long.
    """
    for name in ("home", "__pycache__"):
        (tmp_path / name).touch()
    (tmp_path / "elsewhere.py").write_text(
        "from ds_infinipipe.planner.predict.kernels import compiled\n"
        "@compiled('int64(int64)')\n"
        "def doubled(x):\n"
        "    return 2 * x\n"
    )
    code = (
        "import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(message)s');"
        "logging.getLogger('ds_infinipipe').setLevel('DEBUG');"
        "from elsewhere import doubled;"
        "print(doubled(21), len(doubled.nopython_signatures))"
    )
    home = str(tmp_path / "home")
    environment = {"HOME": home, "XDG_CACHE_HOME": home, "NUMBA_CACHE_DIR": ""}
    path = os.pathsep.join([str(PACKAGE.parent), str(tmp_path)])
    output = run_python(code, PACKAGE.parent, **environment, PYTHONPATH=path).splitlines()
    assert output[-2].startswith("doubled is compiled without a cache")
    assert output[-1] == "42 1"
