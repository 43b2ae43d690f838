"""The verifier accepts valid plans and rejects every kind of broken one."""

from __future__ import annotations

import random
import re
from collections import deque
from dataclasses import replace

import break_chunks
import break_frame
import break_pipelines
import break_splits
import break_streams
import break_times
import pytest
from effort import examples
from handmade import (
    make_plan,
    packed,
    random_plan,
    rich_plan,
    unit_timeline,
    whole,
    with_prediction,
    with_setup,
)
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS
from oracles.peak_bytes import peak_bytes
from oracles.transfers import transfer_bytes

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.plan.chunks import Chunk, ChunkKind, Slice
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.planner.predict.memory import MemoryModel
from ds_infinipipe.planner.verify.frame import peak_bytes_by_stage, verify_plan

BREAKERS = (
    break_chunks,
    break_pipelines,
    break_streams,
    break_splits,
    break_frame,
    break_times,
)  # fill MUTATIONS on import
seeds = st.integers(0, 2**32 - 1)


def test_a_hand_made_plan_with_everything_in_it_passes() -> None:
    plan = rich_plan()
    verify_plan(plan, plan.digest())
    kinds = {chunk.kind for chunk in plan.chunks}
    assert kinds == {ChunkKind.SPLIT, ChunkKind.HYBRID, ChunkKind.BATCHED}
    assert plan.padding_tokens == 3


@given(seeds)
@examples(150)
def test_random_valid_plans_pass(seed: int) -> None:
    plan = random_plan(seed)
    verify_plan(plan, plan.digest())


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_plan_is_rejected_with_its_reason(name: str) -> None:
    break_plan, pattern = MUTATIONS[name]
    for seed in range(10):
        broken = break_plan(rich_plan(), random.Random(seed))
        assert broken is not None, "the hand-made plan has something of every kind to break"
        with pytest.raises(ScheduleError) as error:
            verify_plan(broken)
        assert re.search(pattern, str(error.value)), str(error.value)


@given(seeds, st.sampled_from(sorted(MUTATIONS)))
@examples(500)
def test_random_plans_broken_in_any_way_are_rejected(seed: int, name: str) -> None:
    broken = MUTATIONS[name][0](random_plan(seed), random.Random(seed))
    if broken is not None:
        with pytest.raises(ScheduleError):
            verify_plan(broken)


def test_most_mutations_apply_to_most_random_plans() -> None:
    applied = dict.fromkeys(MUTATIONS, 0)
    for seed in range(60):
        plan = random_plan(seed)
        for name, (break_plan, _) in MUTATIONS.items():
            applied[name] += break_plan(plan, random.Random(seed)) is not None
    assert len(BREAKERS) == 6 and len(applied) >= 78
    assert min(applied.values()) >= 10, applied


def _runs_to_the_end(plan: Plan) -> bool:
    """A naive executor: real queues between neighbours, contents checked, chains checked."""
    pp = plan.layout.pp
    channels: dict[tuple[int, int], deque[tuple[Op, int]]] = {}
    posted: list[deque[tuple[int, Op, int]]] = [deque() for _ in range(pp)]
    have: list[set[tuple[Op, int]]] = [set() for _ in range(pp)]
    at = [0] * pp
    progress = True
    while progress:
        progress = False
        for stage in range(pp):
            while at[stage] < len(plan.streams[stage]):
                _complete_receives(stage, posted, channels, have)
                instruction = plan.streams[stage][at[stage]]
                is_half = instruction.op is Op.BACKWARD_INPUT
                key = (Op.BACKWARD if is_half else instruction.op, instruction.chunk)
                needs = {
                    Op.FORWARD: {(Op.RECV_ACTIVATION, instruction.chunk)} if stage else set(),
                    Op.BACKWARD: {(Op.FORWARD, instruction.chunk)}
                    | ({(Op.RECV_GRADIENT, instruction.chunk)} if stage < pp - 1 else set()),
                    Op.SEND_ACTIVATION: {(Op.FORWARD, instruction.chunk)},
                    Op.SEND_GRADIENT: {(Op.BACKWARD, instruction.chunk)},
                    Op.BACKWARD_WEIGHT: {(Op.BACKWARD, instruction.chunk)},
                }.get(key[0], set())
                if not needs <= have[stage]:
                    break
                if instruction.op is Op.SEND_ACTIVATION:
                    channels.setdefault((stage, stage + 1), deque()).append(key)
                elif instruction.op is Op.SEND_GRADIENT:
                    channels.setdefault((stage, stage - 1), deque()).append(key)
                elif instruction.op is Op.RECV_ACTIVATION:
                    posted[stage].append((stage - 1, *key))
                elif instruction.op is Op.RECV_GRADIENT:
                    posted[stage].append((stage + 1, *key))
                else:
                    have[stage].add(key)
                at[stage] += 1
                progress = True
    return all(at[s] == len(plan.streams[s]) for s in range(pp)) and not any(channels.values())


def _complete_receives(
    stage: int,
    posted: list[deque[tuple[int, Op, int]]],
    channels: dict[tuple[int, int], deque[tuple[Op, int]]],
    have: list[set[tuple[Op, int]]],
) -> None:
    """Whatever the wire holds goes into the first buffer posted for it, right or wrong."""
    waiting: deque[tuple[int, Op, int]] = deque()
    for peer, op, chunk in posted[stage]:
        wire = channels.get((peer, stage))
        if wire and not any(w[0] == peer for w in waiting):
            _, sent = wire.popleft()
            if sent == chunk:  # a wrong tensor would be consumed as this chunk's
                have[stage].add((op, chunk))
        else:
            waiting.append((peer, op, chunk))
    posted[stage] = waiting


@given(seeds)
@examples(300)
def test_whatever_edit_of_a_stream_the_verifier_accepts_does_run(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(seed, max_sequences=5)
    assert _runs_to_the_end(plan)
    for _ in range(4):
        stage = rng.randrange(plan.layout.pp)
        stream = list(plan.streams[stage])
        source, target = rng.randrange(len(stream)), rng.randrange(len(stream))
        stream.insert(target, stream.pop(source))
        streams = list(plan.streams)
        streams[stage] = tuple(stream)
        edited = with_setup(replace(plan, streams=tuple(streams)), limit_bytes=2**50)
        try:
            verify_plan(with_setup(with_prediction(edited), limit_bytes=2**50))
        except ScheduleError:
            continue
        assert _runs_to_the_end(edited)


def test_another_plans_digest_is_rejected() -> None:
    plan = rich_plan()
    with pytest.raises(ScheduleError, match="expected was"):
        verify_plan(plan, random_plan(1).digest())


def test_the_error_names_stage_instruction_and_neighbourhood() -> None:
    plan = rich_plan()
    stream = [i for i in plan.streams[1] if str(i) != "F3"]
    index = next(n for n, i in enumerate(stream) if str(i) == "SEND_F3")
    stream.insert(index + 1, next(i for i in plan.streams[1] if str(i) == "F3"))
    with pytest.raises(ScheduleError) as error:
        verify_plan(replace(plan, streams=(plan.streams[0], tuple(stream), plan.streams[2])))
    assert "stage 1, instruction" in str(error.value)
    assert ">>SEND_F3<<" in str(error.value)


def test_the_memory_error_gives_need_limit_and_breakdown() -> None:
    plan = with_setup(rich_plan(), limit_bytes=2**10)
    with pytest.raises(ScheduleError) as error:
        verify_plan(plan)
    text = str(error.value)
    assert re.search(r"stage 0 needs \d+\.\d\d GiB at instruction \d+ \([FBIW]\d", text)
    for part in (
        "limit",
        "states",
        "activations",
        "kv arenas",
        "kv gradients",
        "stashes",
        "transient",
    ):
        assert part in text


class UnitBytes(MemoryModel):
    """Byte formulas that a peak can be worked out for by hand."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.static_bytes = (1_000_000,) * setup.layout.pp

    def saved_bytes(self, chunk: Chunk) -> int:
        return 100 * chunk.padded_tokens

    def input_bytes(self, chunk: Chunk) -> int:
        return 10 * chunk.padded_tokens

    def output_bytes(self, stage: int, chunk: Chunk) -> int:
        return chunk.padded_tokens

    def arena_bytes(self, sequence_len: int) -> int:
        return 1000 * sequence_len

    def kv_grad_bytes(self, context_len: int) -> int:
        return 20_000 * context_len

    def forward_transient(self, stage: int, chunk: Chunk, recompute: int) -> int:
        return 7

    def backward_transient(self, stage: int, chunk: Chunk, recompute: int) -> int:
        return 3


def test_the_peak_of_a_sliced_sequence_is_the_one_worked_out_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ds_infinipipe.planner.verify.memory.MemoryModel", UnitBytes)
    chunks = (Slice(0, 0, 4, False), Slice(0, 4, 2, True))
    plan = make_plan([6], [packed(1, s) for s in chunks], [(0, 1)], pp=1, layers_per_stage=2)
    # F0 F1 B1 B0; at B1 both chunks hold 2 layers * 100 + 1 per token of 6, the arena 2 * 6 * 1000,
    # dK and dV of the 4 rows before the tail 2 * 4 * 20,000, the transient 3
    at_tail = 6 * 201 + 12_000 + 160_000 + 3
    assert peak_bytes_by_stage(plan) == (1_000_000 + at_tail,)
    one_recomputed = make_plan(
        [6], [packed(1, s) for s in chunks], [(0, 1)], pp=1, recompute=lambda stage, chunk: chunk
    )
    # of chunk 1 (2 tokens) one layer keeps 10 instead of 100 bytes a token
    assert peak_bytes_by_stage(one_recomputed) == (1_000_000 + at_tail - 2 * 90,)


def test_the_peak_of_batched_chunks_is_the_window_and_nothing_lingers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ds_infinipipe.planner.verify.memory.MemoryModel", UnitBytes)
    chunks = [packed(1, whole(i, n)) for i, n in enumerate((3, 5, 2, 9))]
    plan = make_plan([3, 5, 2, 9], chunks, [(0, 1, 2, 3)], pp=2)
    # stage 0 holds two chunks: F0 F1 B0 F2 B1 F3 B2 B3, most with chunks 2 and 3 at F3, where the
    # outputs of both are not known to be taken
    first = 1_000_000 + 11 * 201 + 7 + 10 * (2 + 9)
    # stage 1 holds one: most at F3, when stage 0 has not yet said that it has the gradient of 2
    second = 1_000_000 + 9 * 201 + 7 + 10 * 2
    assert peak_bytes_by_stage(plan) == (first, second)


@given(seeds)
@examples(60)
def test_the_verifiers_count_equals_the_memory_models_scan(seed: int) -> None:
    plan = random_plan(seed)
    memory = MemoryModel(plan.setup)
    recompute: list[dict[int, int]] = [{} for _ in range(plan.layout.pp)]
    for pipeline in plan.pipelines:
        for stage in range(plan.layout.pp):
            recompute[stage].update(zip(pipeline.forward, pipeline.recompute[stage], strict=True))
    operations = [[(i.op, i.chunk) for i in row if i.op.is_compute] for row in plan.streams]
    transfers = transfer_bytes(operations, [memory.input_bytes(chunk) for chunk in plan.chunks])
    scanned = tuple(
        peak_bytes(memory, stage, row, plan.chunks, recompute[stage], transfers[stage])
        for stage, row in enumerate(operations)
    )
    assert peak_bytes_by_stage(plan) == scanned


@pytest.mark.parametrize(("pp", "sp"), [(16, 4), (64, 1)])
def test_a_plan_for_64_ranks_passes(pp: int, sp: int) -> None:
    chunks, lengths, forward = [], [], []
    for sequence, slices in enumerate((6, 4, 4, 2)):
        lengths.append(16 * slices)
        for i in range(slices):
            chunks.append(packed(sp, Slice(sequence, 16 * i, 16, i == slices - 1)))
    for _ in range(80):
        chunks.append(packed(sp, whole(len(lengths), 13)))
        lengths.append(13)
    forward = list(range(len(chunks)))
    plan = make_plan(
        lengths,
        chunks,
        [forward],
        pp=pp,
        sp=sp,
        layers_per_stage=1,
        recompute=lambda stage, chunk: (stage + chunk) % 2,
    )
    assert plan.layout.world_size == 64
    verify_plan(plan)
    # p2p is free and every chunk costs the same, so only the halves of a second of recompute
    # come on top of (n + pp - 1)(f + b)
    ideal_s = (len(chunks) + pp - 1) * 3.0
    assert ideal_s <= unit_timeline(plan).makespan_s <= ideal_s * 1.25


def test_a_prediction_from_the_verifiers_own_count_passes() -> None:
    plan = rich_plan()
    verify_plan(with_prediction(with_setup(plan, limit_bytes=2**40)))
