"""Which device a rank takes, and in which order ranks connect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.accelerator import get_accelerator
from ranks import run_ranks

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.launcher import ALLOCATOR_SETTINGS
from ds_infinipipe.runtime.ranks import connections

_TRANSFERS = ("isend", "irecv", "send", "recv")
_COLLECTIVES = ("all_reduce", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")


class _Gpus:
    """An accelerator of two devices that notes which is set."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def device_name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return 2

    def set_device(self, number: int) -> None:
        self.calls.append(number)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> _Gpus:
    found = _Gpus()
    monkeypatch.setattr(connections, "get_accelerator", lambda: found)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.calls.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_rank_takes_the_device_of_its_number_with_an_allocator_for_odd_sizes(
    gpus: _Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    connections.take_device()
    assert gpus.calls == [ALLOCATOR_SETTINGS, 1]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_the_user_chose_stays(
    name: str, gpus: _Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    connections.take_device()
    assert gpus.calls == [0]


def test_more_ranks_than_devices_are_refused(gpus: _Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 2, but this node has 2 GPUs"):
        connections.take_device()
    assert gpus.calls == []


@contextmanager
def _noting(calls: list[str]) -> Iterator[None]:
    """Notes the device that is set, groups that are made, and what is sent over them."""

    def noting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    names = ("new_group", *_TRANSFERS, *_COLLECTIVES)
    patches = [noting(torch_dist, name) for name in names]
    patches.append(noting(type(get_accelerator()), "set_device"))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _first_calls(rank: int, case: Case) -> tuple[list[str], list[str]]:
    start: list[str] = []
    with _noting(start):
        engine = exactness.build_engine(case)
    step: list[str] = []
    batch = exactness.random_batch(case, 0)
    plan = exactness.draw_plan(engine, case, batch, 0)
    with _noting(step):
        engine.train_plan(plan, batch)
    engine.close()
    return start, step


@pytest.mark.ranks
def test_device_groups_and_each_channels_first_use_come_before_the_first_step() -> None:
    case = Case("llama", 4, 1, num_layers=4, num_sequences=2)
    for rank, (start, step) in enumerate(run_ranks(_first_calls, 4, case, timeout=60.0)):
        assert start[0] == "set_device"
        used = [name for name in start if name in _TRANSFERS]
        # a channel for each direction of an edge, used in one order by all stages
        before, after = ["recv", "send"], ["send", "recv"]
        edges = [after, before] if rank % 2 == 0 else [before, after]
        wanted = [edge for edge, is_there in zip(edges, _edges(rank), strict=True) if is_there]
        expected = [edge[number] for number in range(2) for edge in wanted]
        assert used[-len(expected) :] == expected  # DeepSpeed's engine has tried its own before
        last_group = max(n for n, name in enumerate(start) if name == "new_group")
        assert start.index(used[0]) > last_group
        assert "new_group" not in step and "set_device" not in step
        assert {"isend", "irecv"} >= {name for name in step if name in _TRANSFERS} != set()


def _edges(rank: int) -> tuple[bool, bool]:
    """Whether there are an edge behind an even and one behind an odd stage."""
    lower = (rank - 1, rank)  # stages below an edge of this rank
    there = [0 <= stage < 3 for stage in lower]
    by_parity = {stage % 2: found for stage, found in zip(lower, there, strict=True)}
    return by_parity[0], by_parity[1]
