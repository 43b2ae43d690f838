"""Checkpoints on disk: complete or not there at all, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import make_jobs, read_values
from safetensors.torch import load_file

from ds_infinipipe.errors import CheckpointError
from ds_infinipipe.runtime.checkpoint import folder, save, tensor_file
from ds_infinipipe.runtime.checkpoint.checkpointer import Checkpointer
from ds_infinipipe.runtime.checkpoint.load import check_files
from ds_infinipipe.runtime.checkpoint.manifest import compare_parameters, read_manifest
from ds_infinipipe.runtime.checkpoint.tensor_file import TensorHeader, hash_file, write_tensors


def _save(save_dir: Path, tag: str, value: float, keep_last: int | None = None) -> Path:
    folder.prepare(save_dir, tag)
    jobs = make_jobs(save_dir, tag, value, keep_last)
    for job in jobs:
        job.write()
    jobs[0].publish()
    return save_dir / tag


def _check(place: Path) -> None:
    check_files(place, read_manifest(place))


def test_our_tensor_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {
        "x": torch.randn(3, 5),
        "y": torch.randn(7).bfloat16(),
        "z": torch.arange(3, dtype=torch.int64),
        "none": torch.empty(0),
    }
    headers = [TensorHeader(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]
    size, digest = write_tensors(tmp_path / "f", headers, tensors.values(), {"format": "pt"})
    assert (tmp_path / "f").stat().st_size == size
    assert hash_file(tmp_path / "f") == digest
    found = load_file(tmp_path / "f")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) for n, t in tensors.items())


def test_a_tensor_other_than_announced_is_refused(tmp_path: Path) -> None:
    header = TensorHeader("x", torch.float32, (3,))
    with pytest.raises(ValueError, match="announced"):
        write_tensors(tmp_path / "f", [header], [torch.zeros(4)])


def test_a_checkpoint_is_found_by_latest_by_tag_and_by_itself(tmp_path: Path) -> None:
    first, second = _save(tmp_path, "one", 1.0), _save(tmp_path, "two", 2.0)
    assert folder.find_checkpoint(tmp_path) == second
    assert folder.find_checkpoint(tmp_path, "one") == first
    assert folder.find_checkpoint(first) == first
    assert read_values(first) == {1.0} and read_values(second) == {2.0}
    assert sorted(p.name for p in first.iterdir()) == [
        "extras.pt",
        "manifest.json",
        "shard-0.safetensors",
        "shard-1.safetensors",
    ]


def test_the_last_checkpoints_named_by_step_are_kept_and_others_stay(tmp_path: Path) -> None:
    _save(tmp_path, "best", 1.0)
    for step in (30, 2, 3, 4):  # 30 is the oldest: training went back to an earlier one
        _save(tmp_path, f"global_step{step}", step, keep_last=2)
    assert {p.name for p in tmp_path.iterdir()} == {
        "best",
        "global_step3",
        "global_step4",
        "latest",
    }


# ---- killed while saving

_SYSTEM_CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def _save_until(save_dir: Path, tag: str, deadly: int) -> bool:
    """Save in a process that kills itself before its system call number `deadly`; True if it did
    not get that far."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(call: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if count == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return call(*args, **kwargs)

            return run

        for name in _SYSTEM_CALLS:
            setattr(os, name, counted(getattr(os, name)))
        _save(save_dir, tag, 2.0, keep_last=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


@pytest.mark.parametrize("tag", ["global_step2", "global_step1"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, tag: str) -> None:
    """Also where the new one replaces one of the same name, which is the last good one."""
    outcomes = []
    for deadly in range(100):
        save_dir = tmp_path / str(deadly)
        _save(save_dir, "global_step1", 1.0)
        done = _save_until(save_dir, tag, deadly)
        found = folder.find_checkpoint(save_dir)
        _check(found)
        [value] = read_values(found)
        outcomes.append(value)
        _save(save_dir, "global_step3", 3.0)  # and the next save removes what was left
        assert not [p.name for p in save_dir.iterdir() if p.name.startswith(".")]
        assert read_values(folder.find_checkpoint(save_dir)) == {3.0}
        if done:
            break
    assert done and deadly > 15
    assert outcomes == sorted(outcomes) and set(outcomes) == {1.0, 2.0}


def test_a_writer_that_fails_says_so_and_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, "global_step1", 1.0)
    # the kernel's own "no space left on device", at the first byte
    opened = tensor_file.open_new
    monkeypatch.setattr(tensor_file, "open_new", lambda _: opened(Path("/dev/full")))
    folder.prepare(tmp_path, "global_step2")
    job = make_jobs(tmp_path, "global_step2", 2.0)[0]
    with pytest.raises(CheckpointError, match=r"no space is left.*untouched"):
        job.write()
    job.discard()
    assert {p.name for p in tmp_path.iterdir()} == {"global_step1", "latest"}
    _check(folder.find_checkpoint(tmp_path))


def test_a_checkpoint_without_all_files_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "_STALL_S", 0.2)
    folder.prepare(tmp_path, "global_step1")
    job = make_jobs(tmp_path, "global_step1", 1.0)[0]
    job.write()
    with pytest.raises(CheckpointError, match="lacks the files of shard-1"):
        job.publish()
    assert not (tmp_path / "global_step1").exists()


def test_files_that_others_rename_while_rank_0_looks_at_them_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.prepare(tmp_path, "global_step1")
    jobs = make_jobs(tmp_path, "global_step1", 1.0)
    jobs[0].write()
    (jobs[0].folder / ".shard-1.json").symlink_to("nowhere")  # listed, but not there any more
    monkeypatch.setattr(save.time, "sleep", lambda _: jobs[1].write())
    jobs[0].publish()
    _check(folder.find_checkpoint(tmp_path))


# ---- damaged and foreign

_FILE = "shard-1.safetensors"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (_FILE, _flip, f"{_FILE} is damaged, its checksum"),
        (_FILE, _cut, rf"{_FILE} has \d+ of \d+ bytes"),
        (_FILE, Path.unlink, f"{_FILE} is missing"),
        ("extras.pt", _flip, "extras.pt is damaged"),
        ("manifest.json", _flip, "manifest.json is damaged"),
        ("manifest.json", _cut, "manifest.json is damaged"),
        ("manifest.json", Path.unlink, "no checkpoint of ds_infinipipe: it holds extras.pt"),
        ("manifest.json", lambda p: p.write_text("{}"), "was not written by ds_infinipipe"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    place = _save(tmp_path, "one", 1.0)
    damage(place / name)
    with pytest.raises(CheckpointError, match=message):
        _check(folder.find_checkpoint(tmp_path))


def test_checksums_can_be_skipped_but_sizes_cannot(tmp_path: Path) -> None:
    place = _save(tmp_path, "one", 1.0)
    _flip(place / _FILE)
    check_files(place, read_manifest(place), verify=False)
    _cut(place / _FILE)
    with pytest.raises(CheckpointError, match="bytes"):
        check_files(place, read_manifest(place), verify=False)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "it does not exist"),
        ([], "it is empty"),
        (["zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed's own engine"),
        (["config.json", "model.safetensors"], "set infinipipe.model.path"),
        (["a.txt"], "it holds a.txt"),
    ],
)
def test_a_foreign_folder_is_described(
    tmp_path: Path, files: list[str] | None, message: str
) -> None:
    place = tmp_path / "x"
    if files is not None:
        place.mkdir()
    for name in files or []:
        (place / name).touch()
    with pytest.raises(CheckpointError, match=message):
        folder.find_checkpoint(place)


def test_latest_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    place = _save(tmp_path, "one", 1.0)
    shutil.rmtree(place)
    with pytest.raises(CheckpointError, match=r"one is no checkpoint.*does not exist"):
        folder.find_checkpoint(tmp_path)


def test_a_newer_format_asks_for_the_release_that_wrote_it(tmp_path: Path) -> None:
    path = _save(tmp_path, "one", 1.0) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))
    with pytest.raises(CheckpointError, match="format version 9, this installation reads 1"):
        read_manifest(path.parent)


def test_parameters_that_differ_are_listed() -> None:
    with pytest.raises(CheckpointError) as caught:
        compare_parameters({"a": (2, 3), "b": (4,)}, {"a": (3, 2), "c": (1,)}, "checkpoint x")
    message = str(caught.value)
    assert "3 parameters differ" in message
    assert "c is not in the checkpoint" in message
    assert "b is not in the model" in message
    assert "a has shape (2, 3), the model (3, 2)" in message


def test_what_could_run_code_when_read_is_refused_when_saved() -> None:
    with pytest.raises(CheckpointError, match="client_state"):
        save.pack_extras(client_state={"f": test_parameters_that_differ_are_listed})
    assert save.pack_extras(client_state={"t": torch.ones(2), "n": [1, None, "x"]})


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (None, "this run's data has none, so start your iterator or data set behind what was"),
        (object(), "the checkpoint has none, so this run starts at the"),
    ],
)
def test_a_position_in_the_data_that_cannot_be_restored_says_what_to_do(
    sampler: Any, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained = SimpleNamespace(data=SimpleNamespace(sampler=sampler))
    checkpointer: Any = SimpleNamespace(_trained=trained, _rank=SimpleNamespace(is_first=True))
    saved: Any = SimpleNamespace(sampler=None, global_steps=19, global_samples=171)
    Checkpointer._restore_data(checkpointer, saved)
    (text,) = caplog.messages
    assert expected in text and "19 steps with 171 sequences were trained" in text
