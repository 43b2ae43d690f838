"""Plans as text: JSON there and back, digests, instruction text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from effort import examples
from handmade import random_plan, rich_plan, with_setup
from hypothesis import given
from hypothesis import strategies as st

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.chunks import Chunk, ChunkKind, Slice
from ds_infinipipe.planner.plan.plan import PLAN_VERSION, Plan
from ds_infinipipe.planner.plan.stream import Instruction, Op
from ds_infinipipe.planner.predict.area import CAUSAL

RECOMPUTING = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)


@given(st.integers(0, 2**32 - 1))
@examples(60)
def test_a_plan_survives_json(seed: int) -> None:
    plan = random_plan(seed)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest()
    assert Plan.from_json(plan.to_json(indent=2)) == plan


def test_the_json_has_the_published_keys() -> None:
    data = json.loads(rich_plan().to_json())
    assert {"version", "digest", "setup", "lengths", "chunks", "pipelines"} <= set(data)
    assert {"streams", "predicted", "solver"} <= set(data)
    setup = {"model", "cluster", "layout", "execution", "limit_bytes", "alignment"}
    assert set(data["setup"]) == setup
    assert {"pp", "sp", "dp"} <= set(data["setup"]["layout"])
    assert data["chunks"][1]["slices"] == [
        {"sequence": 0, "start": 8, "length": 8},
        {"sequence": 2, "start": 0, "length": 6},
    ]
    first = data["pipelines"][0]
    assert first["forward"] == [0, 1, 2, 3]
    assert first["backward"] == [2, 1, 0, 3]
    assert len(first["recompute"]) == 3 and len(first["recompute"][0]) == 4
    assert data["streams"][0][:4] == ["F0", "SEND_F0", "F1r1", "SEND_F1"]
    assert set(data["predicted"]) == {"step_time_s", "bubble_ratio", "peak_bytes"}
    assert {"mode", "k", "status", "gap", "time_s"} <= set(data["solver"])


def test_the_digest_ignores_only_the_solving_time() -> None:
    plan = rich_plan()
    slower = replace(plan, solver=replace(plan.solver, time_s=99.0))
    assert slower.digest() == plan.digest()
    others = [
        replace(plan, solver=replace(plan.solver, status="feasible")),
        with_setup(plan, zero_stage=0),
        with_setup(plan, loss_block_tokens=7),
        with_setup(plan, keeps_gathered=not plan.setup.execution.keeps_gathered),
        with_setup(plan, limit_bytes=plan.setup.limit_bytes + 1),
        with_setup(plan, alignment=2),
        replace(plan, streams=plan.streams[:-1]),
        replace(plan, chunks=(replace(plan.chunks[0], padding=2), *plan.chunks[1:])),
        replace(plan, pipelines=plan.pipelines[::-1]),
        replace(plan, predicted=replace(plan.predicted, step_time_s=1.0)),
        with_setup(plan, model=replace(plan.model, vocab_size=51)),
    ]
    assert len({plan.digest(), *(other.digest() for other in others)}) == 1 + len(others)


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "another number of layers": lambda d: d["setup"]["model"].update(num_layers=13),
    "a moved slice": lambda d: d["chunks"][1]["slices"][0].update(start=4),
    "another recompute count": lambda d: d["pipelines"][0]["recompute"][0].__setitem__(0, 3),
    "a dropped instruction": lambda d: d["streams"][0].pop(0),
    "another peak": lambda d: d["predicted"]["peak_bytes"].__setitem__(0, 5),
    "another digest": lambda d: d.update(digest="0" * 64),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_edited_plan_file_is_noticed(edit: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(rich_plan().to_json())
    edit(data)
    with pytest.raises(ScheduleError, match="edited or damaged"):
        Plan.from_json(json.dumps(data))


DAMAGE: dict[str, Callable[[dict[str, Any]], None]] = {
    "foreign version": lambda d: d.update(version=1),
    "no digest": lambda d: d.pop("digest"),
    "no chunks": lambda d: d.pop("chunks"),
    "layout is a list": lambda d: d["setup"].update(layout=[1, 2]),
    "no setup": lambda d: d.pop("setup"),
    "unknown setup field": lambda d: d["setup"].update(colour="red"),
    "unknown model field": lambda d: d["setup"]["model"].update(colour="red"),
    "no such ZeRO stage": lambda d: d["setup"]["execution"].update(zero_stage=2),
    "no alignment": lambda d: d["setup"].update(alignment=0),
    "sequence out of range": lambda d: d["chunks"][0]["slices"][0].update(sequence=77),
    "pipelines missing": lambda d: d.update(pipelines=None),
    "lengths as text": lambda d: d.update(lengths=[str(n) for n in d["lengths"]]),
    "a start as text": lambda d: d["chunks"][0]["slices"][0].update(start="0"),
    "a padding of half a token": lambda d: d["chunks"][0].update(padding=0.5),
    "true for a chunk": lambda d: d["pipelines"][0]["forward"].__setitem__(0, True),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_file_that_is_no_plan_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(rich_plan().to_json())
    damage(data)
    with pytest.raises(ScheduleError, match=f"not a plan file of version {PLAN_VERSION}"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "3", "[" * 100_000])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="not a plan file"):
        Plan.from_json(text)


@given(
    st.sampled_from([op for op in Op if op.has_chunk]),
    st.integers(0, 5000),
    st.integers(0, 99),
)
def test_instruction_text_goes_there_and_back(op: Op, chunk: int, layers: int) -> None:
    instruction = Instruction(op, chunk, layers if op in RECOMPUTING else 0)
    assert Instruction.parse(str(instruction)) == instruction


def test_instruction_text_looks_like_this() -> None:
    assert str(Instruction(Op.FORWARD, 2)) == "F2"
    assert str(Instruction(Op.BACKWARD, 12, 3)) == "B12r3"
    assert str(Instruction(Op.BACKWARD_INPUT, 4, 1)) == "I4r1"
    assert str(Instruction(Op.BACKWARD_WEIGHT, 4)) == "W4"
    assert str(Instruction(Op.SEND_GRADIENT, 0)) == "SEND_B0"


@pytest.mark.parametrize("op", [op for op in Op if not op.has_chunk])
def test_instructions_without_a_chunk_are_their_name(op: Op) -> None:
    assert str(Instruction(op)) == op.value
    assert Instruction.parse(op.value) == Instruction(op)


@pytest.mark.parametrize("text", ["", "F", "F-1", "f1", "F1r", "STEP1", "RECV_3", "SEND_F1 ", "X2"])
def test_other_text_is_no_instruction(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an instruction"):
        Instruction.parse(text)


@pytest.mark.parametrize("text", ["SEND_F1r2", "W1r2"])
def test_only_f_b_and_i_carry_recomputed_layers(text: str) -> None:
    with pytest.raises(ScheduleError, match="only F, B and I"):
        Instruction.parse(text)


def test_a_chunk_knows_its_tokens_kind_and_area() -> None:
    split = Chunk((Slice(0, 8, 4, False),))
    hybrid = Chunk((Slice(0, 12, 3, True), Slice(1, 0, 2, True)), padding=1)
    batched = Chunk((Slice(1, 0, 2, True), Slice(2, 0, 5, True)))
    assert [c.kind for c in (split, hybrid, batched)] == [
        ChunkKind.SPLIT,
        ChunkKind.HYBRID,
        ChunkKind.BATCHED,
    ]
    assert (hybrid.tokens, hybrid.padded_tokens, hybrid.context_len) == (5, 6, 12)
    assert (hybrid.split_tokens, batched.split_tokens) == (3, 0)
    assert CAUSAL.of_chunk(split) == 12**2 - 8**2
    assert CAUSAL.of_chunk(hybrid) == 15**2 - 12**2 + 2**2
    assert CAUSAL.of_chunk(batched) == 4 + 25
