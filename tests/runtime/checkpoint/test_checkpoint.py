"""Saving and loading with real ranks: any layout to any layout, every step, every kind of fault."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from checkpoint_cases import (
    Numbered,
    build,
    differences,
    layout_name,
    quiet,
    snapshot,
    train,
    with_layout,
)
from ranks import RankFailure, run_strict

from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.errors import CheckpointError, ConfigError, PeerTimeoutError
from ds_infinipipe.runtime.checkpoint import tensor_file
from ds_infinipipe.runtime.checkpoint.folder import find_checkpoint
from ds_infinipipe.runtime.checkpoint.load import check_files
from ds_infinipipe.runtime.checkpoint.manifest import read_manifest
from ds_infinipipe.runtime.engine.train import train as train_by_config

pytestmark = pytest.mark.ranks

CASE = Case("llama", 2, 1, num_layers=2, num_heads=2, tied=True, num_sequences=4, max_tokens=30)
DEEP = Case(
    "qwen3",
    tied=True,
    num_layers=4,
    num_heads=6,
    num_kv_heads=6,
    num_sequences=4,
    max_tokens=30,
)


# ---- every layout to every layout


def _visit(rank: int, cases: list[Case], folder: str) -> list[tuple[str, str, list[str]]]:
    """At each layout load all there is, compare it with the first one saved, and save it anew."""
    found = []
    first = Path(folder) / "first"
    for case in cases:
        engine = build(case)
        if not first.exists():
            train(engine, case, 2)
            engine.save_checkpoint(folder, tag="first", client_state={"seen": [1, 2]})
        for saved in sorted(p.name for p in Path(folder).iterdir() if p.is_dir()):
            _, client_state = engine.load_checkpoint(folder, saved)
            wrong = differences(engine, first)
            if client_state != {"seen": [1, 2]} or engine.global_steps != 2:
                wrong.append(f"client state {client_state}, step {engine.global_steps}")
            found.append((saved, layout_name(case), wrong))
        engine.save_checkpoint(folder, tag=layout_name(case), client_state={"seen": [1, 2]})
        # the weights that are trained with follow the masters, also those kept gathered
        found.append(("loss", layout_name(case), train(engine, case, 1)))
        engine.close()
        torch_dist.barrier()
    return found


def test_every_layout_loads_what_every_layout_saved(tmp_path: Path) -> None:
    """2x2, 4x1, 1x4, 1x3 (padded partitions), 1x1 and replicas; sharded or not, over dp or not."""
    folder = str(tmp_path)
    four = [(2, 2, 1, 3), (4, 1, 1, 3), (1, 4, 1, 3), (2, 1, 2, 3), (2, 2, 1, 0)]
    cut = [replace(with_layout(DEEP, *n), shards_optimizer=True) for n in ((2, 1, 2), (1, 1, 4))]
    visits = [
        [*(with_layout(DEEP, *layout) for layout in four), *cut],
        [with_layout(DEEP, 1, 3)],
        [with_layout(DEEP, 1, 1, 1, 3), with_layout(DEEP, 1, 1, 1, 0)],
        [with_layout(DEEP, *layout) for layout in four[1:3]],
    ]
    pairs, losses = set(), []
    for cases in visits:
        size = cases[0].pp * cases[0].sp * cases[0].dp
        for found in run_strict(_visit, size, cases, folder, timeout=300.0):
            for saved, layout, result in found:
                if saved == "loss":
                    losses += result
                else:
                    assert result == [], (saved, layout)
                    pairs.add((saved, layout))
    assert len(pairs) >= 40
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


# ---- going on exactly


def _steps(engine: Any, until: int) -> list[tuple[tuple[int, ...], float, float]]:
    """Sequence ids, loss and learning rate of each step."""
    steps = []
    while engine.global_steps < until:
        loss = float(engine.train_batch())
        ids = tuple(int(ids[0]) for ids in engine._whole_batch.ids)
        steps.append((ids, loss, float(engine.get_lr()[0])))
    return steps


def _resume_everywhere(rank: int, case: Case, bf16: bool, folder: str) -> None:
    data = Numbered(8, case.vocab_size)  # 3 steps an epoch, the last one with fewer sequences
    engine = build(case, data, {"planning": {"asynchronous": not bf16}}, bf16=bf16)
    steps, states = [], []
    engine.save_checkpoint(folder, tag="0")  # before the optimizer has any state
    for index in range(1, 6):
        steps += _steps(engine, index)
        states.append(snapshot(engine))
        engine.save_checkpoint(folder, tag=str(index))
    engine.close()
    assert sorted(i for ids, _, _ in steps[:3] for i in ids) == list(range(8))
    assert len({i for ids, _, _ in steps[3:] for i in ids}) == 6  # of the next epoch
    other = build(case, data, {"planning": {"asynchronous": not bf16}}, bf16=bf16)
    for start in (4, 0, 1, 3, 2):
        other.load_checkpoint(folder, str(start))
        assert _steps(other, 5) == steps[start:], f"resumed after step {start}"
        assert all(torch.equal(states[-1][k], v) for k, v in snapshot(other).items())
    assert other.global_samples == 14  # 3 + 3 + 2, 3 + 3
    other.close()


@pytest.mark.parametrize(
    ("pp", "sp", "zero_stage", "bf16"), [(2, 1, 3, False), (1, 2, 3, True), (1, 2, 0, False)]
)
def test_resuming_after_any_step_gives_the_same_sequences_losses_and_states(
    tmp_path: Path, pp: int, sp: int, zero_stage: int, bf16: bool
) -> None:
    case = Case("llama", pp, sp, zero_stage=zero_stage, num_layers=2, num_sequences=3)
    run_strict(_resume_everywhere, 2, case, bf16, str(tmp_path), timeout=200.0)


def _train_in_parts(rank: int, config: dict[str, Any], folders: list[str]) -> list[list[float]]:
    quiet()
    losses = []
    for folder, steps in zip(folders, (5, 3, 5), strict=True):
        config["infinipipe"]["checkpoint"]["save_dir"] = folder
        losses.append(train_by_config(config, steps))
    return losses


def test_train_saves_as_configured_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    from ds_infinipipe.checks import exactness

    (tmp_path / "corpus").mkdir()
    for index in range(7):
        (tmp_path / "corpus" / f"{index}.txt").write_text(f"document {index} " * (index + 1))
    config = exactness.make_config(Case("llama", 2, 1, num_layers=2, vocab_size=300, max_tokens=64))
    config["train_batch_size"] = 3
    config["infinipipe"]["data"] = {"path": str(tmp_path / "corpus")}
    config["infinipipe"]["checkpoint"] = {"every_steps": 2, "keep_last": 2, "asynchronous": True}
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    results = run_strict(_train_in_parts, 2, config, [whole, parts, parts], timeout=200.0)
    uninterrupted, first, second = results[0]
    assert len(uninterrupted) == 5 and len(first) == 3 and len(second) == 2
    assert first + second == uninterrupted
    for folder in (whole, parts):
        names = {p.name for p in Path(folder).iterdir()}
        assert names == {"global_step4", "global_step5", "latest"}
        assert find_checkpoint(Path(folder)).name == "global_step5"


# ---- what is wrong is an error on every rank, and changes nothing


def _fails(call: Any, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def _damage(folder: Path) -> None:
    """Copies of checkpoint `good`, each with something wrong."""
    for name in ("flipped", "cut", "without"):
        shutil.copytree(folder / "good", folder / name)
    file = "stage-01-shard-000.safetensors"
    content = bytearray((folder / "good" / file).read_bytes())
    content[-9] ^= 1
    (folder / "flipped" / file).write_bytes(content)
    (folder / "cut" / file).write_bytes(content[:100])
    (folder / "without" / file).unlink()
    (folder / "foreign").mkdir()
    (folder / "foreign" / "mp_rank_00_model_states.pt").touch()


def _meet_bad_checkpoints(rank: int, folder: str) -> None:
    engine = build(CASE)
    train(engine, CASE, 1)
    engine.save_checkpoint(folder, tag="good")
    train(engine, CASE, 1)
    before = snapshot(engine)
    if rank == 0:
        _damage(Path(folder))
    torch_dist.barrier()
    expected = {
        "flipped": "is damaged, its checksum does not match",
        "cut": "has 100 of",
        "without": "is missing",
        "foreign": "DeepSpeed's own engine",
        "absent": "does not exist",
    }
    for tag, message in expected.items():
        assert message in _fails(lambda tag=tag: engine.load_checkpoint(folder, tag)), tag
    assert "does not exist" in _fails(lambda: engine.load_checkpoint(folder + "/none"))
    assert "strict" in _fails(
        lambda: engine.load_checkpoint(folder, load_module_strict=False), ConfigError
    )
    assert engine.global_steps == 2
    assert all(torch.equal(before[k], v) for k, v in snapshot(engine).items())

    engine.load_checkpoint(folder, "good", load_module_only=True)
    assert engine.global_steps == 2
    assert {kind for _, kind in snapshot(engine)} == {"weight"}
    train(engine, CASE, 1)
    engine.load_checkpoint(folder, "good", load_optimizer_states=False)
    assert engine.global_steps == 1
    assert {kind for _, kind in snapshot(engine)} == {"weight"}
    engine.load_checkpoint(folder, "good")
    assert differences(engine, Path(folder) / "good") == []
    engine.close()


def test_bad_checkpoints_are_errors_on_every_rank_and_change_nothing(tmp_path: Path) -> None:
    run_strict(_meet_bad_checkpoints, 2, str(tmp_path), timeout=200.0)


def _load_into_others(rank: int, folder: str) -> None:
    engine = build(CASE, Numbered(8, 97))
    train(engine, CASE, 1)
    engine.save_checkpoint(folder)
    engine.close()

    wider = replace(CASE, tied=False, vocab_size=99)
    other = build(wider, Numbered(8, 97))
    message = _fails(lambda: other.load_checkpoint(folder))
    assert "lm_head.weight is not in the checkpoint" in message
    assert "model.embed_tokens.weight has shape (97, 16), the model (99, 16)" in message
    other.close()

    for seed, restore_data in ((1, True), (1, False)):
        section = {"data": {"seed": seed}, "checkpoint": {"restore_data": restore_data}}
        reseeded = build(CASE, Numbered(8, 97), section)
        before = snapshot(reseeded)
        if restore_data:
            message = _fails(lambda e=reseeded: e.load_checkpoint(folder), ConfigError)
            assert "the saved data order has seed 0 but this run has 1" in message
            assert "set infinipipe.data.seed back, or set infinipipe.checkpoint.rest" in message
            assert all(torch.equal(before[k], v) for k, v in snapshot(reseeded).items())
        else:
            reseeded.load_checkpoint(folder)
            assert differences(reseeded, find_checkpoint(Path(folder))) == []
        reseeded.close()


def test_another_model_or_data_order_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run_strict(_load_into_others, 2, str(tmp_path), timeout=200.0)


# ---- failing and dying while saving


def _fail_while_saving(rank: int, folder: str) -> None:
    engine = build(CASE)
    engine.save_checkpoint(folder, tag="good")
    good = {p.name for p in Path(folder).iterdir()}
    opened = tensor_file.open_new
    if rank == 1:
        tensor_file.open_new = lambda _: opened(Path("/dev/full"))
    message = _fails(lambda: engine.save_checkpoint(folder))
    assert "no space is left" in message and "untouched" in message
    tensor_file.open_new = opened
    torch_dist.barrier()
    assert {p.name for p in Path(folder).iterdir()} == good
    tag = f"of-rank-{rank}"
    assert "different tags" in _fails(lambda: engine.save_checkpoint(folder, tag), ConfigError)
    assert "cannot name" in _fails(lambda: engine.save_checkpoint(folder, "a/b"), ConfigError)
    (Path(folder) / "file").touch()
    assert "cannot be written" in _fails(lambda: engine.save_checkpoint(folder + "/file"))
    assert engine.save_checkpoint(folder) is True
    assert find_checkpoint(Path(folder)).name == "global_step0"
    engine.close()


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    run_strict(_fail_while_saving, 2, str(tmp_path), timeout=200.0)


def _save_and_die(rank: int, folder: str) -> None:
    engine = build(CASE)
    engine.save_checkpoint(folder, tag="good")
    write = tensor_file._write_all

    def write_and_die(file: Any, content: memoryview) -> None:
        write(file, content)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    tensor_file._write_all = write_and_die
    engine.save_checkpoint(folder, tag="other")


def _load_and_save(rank: int, folder: str) -> None:
    engine = build(CASE)
    place, _ = engine.load_checkpoint(folder)
    assert Path(place).name == "good"
    engine.save_checkpoint(folder, tag="other")
    engine.close()


@pytest.mark.waits
def test_a_rank_killed_while_writing_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises((RankFailure, RuntimeError, PeerTimeoutError)):
        run_strict(_save_and_die, 2, str(tmp_path), timeout=60.0)
    run_strict(_load_and_save, 2, str(tmp_path), timeout=200.0)
    assert {p.name for p in tmp_path.iterdir()} == {"good", "latest", "other"}
    for tag in ("good", "other"):
        check_files(tmp_path / tag, read_manifest(tmp_path / tag))


# ---- beside training


def _save_beside(rank: int, folder: str) -> None:
    engine = build(CASE, section={"checkpoint": {"asynchronous": True}})
    train(engine, CASE, 1)
    before = snapshot(engine)
    gate = threading.Event()
    write = tensor_file.write_tensors

    def slow(*args: Any) -> Any:
        gate.wait(30.0)
        return write(*args)

    tensor_file.write_tensors = slow
    engine.save_checkpoint(folder, tag="one")
    train(engine, CASE, 1)  # changes the states while they wait to be written
    assert not (Path(folder) / "one").exists()
    gate.set()
    engine.wait_for_checkpoint()
    torch_dist.barrier()
    after = snapshot(engine)
    assert not all(torch.equal(before[k], v) for k, v in after.items())
    engine.load_checkpoint(folder, "one")
    assert all(torch.equal(before[k], v) for k, v in snapshot(engine).items())

    def broken(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == 1:
        tensor_file.write_tensors = broken
    engine.save_checkpoint(folder, tag="two")
    assert "no space is left" in _fails(lambda: engine.save_checkpoint(folder, tag="three"))
    torch_dist.barrier()
    assert {p.name for p in Path(folder).iterdir()} == {"one", "latest"}
    engine.save_checkpoint(folder, tag="four")
    assert "no space is left" in _fails(engine.close)
    assert find_checkpoint(Path(folder)).name == "one"


def test_a_save_beside_training_holds_the_states_it_was_asked_for(tmp_path: Path) -> None:
    run_strict(_save_beside, 2, str(tmp_path), timeout=200.0)
    assert {p.name for p in tmp_path.iterdir()} == {"one", "latest"}
