"""A rank that runs out of memory: all ranks end with its cause, and the next start needs less."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from oom_cases import Fault, end_with_fault, make_engine
from ranks import run_ranks

from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.config.section import InfiniPipeConfig, RecoverySettings
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.runtime.checkpoint.memory_limit import (
    MEMORY_LIMIT_FILE,
    MemoryLimit,
    read_memory_limit,
    write_memory_limit,
)
from ds_infinipipe.runtime.engine.out_of_memory import MemoryGuard, OomReport, is_out_of_memory
from ds_infinipipe.runtime.ranks.store import SideChannel

pytestmark = pytest.mark.ranks

_SMALL = Case("llama", 2, 1, num_layers=2, num_sequences=3)
_SHARDED = Case("qwen3", 2, 2, num_layers=2, num_sequences=3)
_REPLICATED = Case("llama", 1, 1, dp=2, num_layers=1, num_sequences=3)
_ALONE = Case("llama", 1, 1, num_layers=1, num_sequences=3)
_BACKWARD = Fault((0,), "backward")


@pytest.mark.parametrize(
    ("case", "fault", "culprits"),
    [
        (_SMALL, Fault((0,), "backward", error=MemoryError), "0 (stage 0)"),
        (_SMALL, Fault((1,), "evaluate"), "1 (stage 1)"),
        (_SMALL, Fault((1,), "optimizer"), "1 (stage 1)"),
        (_SHARDED, Fault((2,), "gather", nth=2, is_after=True), "2 (stage 1)"),
        (_SHARDED, Fault((0, 1), "reduce", is_after=True), "0 (stage 0) or 1 (stage 0)"),
        (_REPLICATED, Fault((1,), "sum"), "1 (stage 0)"),
    ],
)
def test_all_ranks_end_with_the_cause_and_leave_a_lower_limit(
    case: Case, fault: Fault, culprits: str, tmp_path: Path
) -> None:
    section = {"checkpoint": {"save_dir": str(tmp_path)}}
    size = case.pp * case.sp * case.dp
    answers = run_ranks(end_with_fault, size, case, fault, section, timeout=90.0)
    assert len(set(answers)) == 1, answers
    found = re.match(r"OutOfMemoryError: step 1: rank (\d+ \(stage \d\)) ran out", answers[0])
    assert found is not None and found[1] in culprits.split(" or "), answers[0]
    assert "the plan predicts a peak of" in answers[0] and "injected" in answers[0]
    assert "goes on from the last checkpoint and plans within" in answers[0]
    stored = read_memory_limit(tmp_path)
    assert stored is not None and (stored.step, stored.lowerings) == (1, 1)
    assert stored.cause in answers[0] and f"{MEMORY_LIMIT_FILE} says" in answers[0]
    assert [file.name for file in tmp_path.iterdir()] == [MEMORY_LIMIT_FILE]


def _ends(rank: int, folder: str) -> list[str]:
    """Without a folder, without recovery, within a stored limit, and once more at another step."""
    stored = {"checkpoint": {"save_dir": folder}}
    return [
        end_with_fault(rank, _ALONE, _BACKWARD),
        end_with_fault(rank, _ALONE, _BACKWARD, {"recovery": {"enabled": False}, **stored}),
        end_with_fault(rank, _ALONE, _BACKWARD, stored),
        end_with_fault(rank, _ALONE, _BACKWARD, stored),
    ]


def test_what_to_do_is_said_where_no_limit_can_be_stored_and_lowered_where_one_is(
    tmp_path: Path,
) -> None:
    [[homeless, off, first, second]] = run_ranks(_ends, 1, str(tmp_path), timeout=60.0)
    for text in (homeless, off):
        assert "Set infinipipe.planner.memory_limit_gib below" in text
    assert "or infinipipe.checkpoint.save_dir" in homeless
    assert "or infinipipe.recovery.enabled to true" in off
    stored = read_memory_limit(tmp_path)
    assert stored is not None and stored.lowerings == 2
    assert stored.cause in first and stored.cause in second


def test_steps_that_fail_in_turn_count_together_until_one_is_passed() -> None:
    guard: Any = MemoryGuard.__new__(MemoryGuard)
    guard._settings, guard._stored = RecoverySettings(reduction=0.5), None
    counts = []
    for step in (5, 7, 6, 7, 9, 9):
        report = OomReport(0, 0, step, "place", 80, 100, "", "cause")
        guard._stored = guard._lower_limit(report)
        counts.append((guard._stored.step, guard._stored.lowerings))
        assert guard._stored.limit_bytes == 40
    assert counts == [(5, 1), (7, 1), (7, 2), (7, 3), (9, 1), (9, 2)]


def _start(rank: int, folder: str, **planner: Any) -> tuple[str, int]:
    """What a start says, and the limit that its plans keep to."""
    try:
        engine = make_engine(
            _ALONE,
            {
                "checkpoint": {"save_dir": folder},
                "planner": {"solver": "greedy", "mode": "paper", **planner},
            },
        )
    except ConfigError as error:
        return str(error), 0
    engine.check_longest([30])
    plan, _ = engine._plans.plan_for((30,), aside=True)
    engine.close()
    return "", plan.setup.limit_bytes


def _starts(rank: int, folder: str) -> list[tuple[str, int]]:
    file = Path(folder)
    found = [_start(rank, folder)]
    limit = found[0][1] // 2
    for stored in (
        MemoryLimit(limit, 7, 3, "rank 3 ran out"),
        MemoryLimit(limit, 7, 4, "rank 3 ran out"),
        MemoryLimit(2 * found[0][1], 7, 1, "rank 3 ran out"),
        MemoryLimit(1000, 7, 1, "rank 3 ran out"),
    ):
        write_memory_limit(file, stored)
        found.append(_start(rank, folder))
    (file / MEMORY_LIMIT_FILE).write_text("{}")
    found.append(_start(rank, folder))
    return found


def test_a_start_keeps_to_a_stored_limit_as_far_as_batches_fit_and_not_for_ever(
    tmp_path: Path,
) -> None:
    [found] = run_ranks(_starts, 1, str(tmp_path), timeout=60.0)
    (_, configured), within, refused, above, tiny, damaged = found
    assert within == ("", configured // 2)
    assert above == ("", configured)
    assert tiny == ("", configured)  # nothing fits in it
    assert "up to step 7 the run has run out of memory 4 times in a row" in refused[0]
    assert "max_lowerings is 3. The last time rank 3 ran out." in refused[0]
    assert "has other content than limit_bytes, step" in damaged[0]


def _save_and_run_out(rank: int, folder: str) -> str:
    """An own loop, whose folder the configuration does not name."""
    engine = make_engine(_ALONE)
    engine.save_checkpoint(folder)
    before = engine.memory_guard._folder
    engine.load_checkpoint(folder)
    engine.close()
    return str(before)


def test_an_own_loops_folder_of_checkpoints_keeps_the_limit(tmp_path: Path) -> None:
    assert run_ranks(_save_and_run_out, 1, str(tmp_path), timeout=60.0) == [str(tmp_path)]


def _listen(rank: int) -> tuple[int, str, str | None, str | None]:
    heard: list[None] = []
    channel = SideChannel(10.0, lambda: heard.append(None))
    channel.begin()
    stands = channel.announce(f"cause {rank}") if rank < 2 else ""
    while not heard:
        time.sleep(0.01)
    torch.distributed.barrier()
    channel.fail("no data")
    torch.distributed.barrier()
    failed = channel.failed()
    channel.begin()
    assert channel.failed() is None
    channel.close()
    return len(heard), stands, channel.announced(), failed


def test_ranks_hear_the_first_announcement_and_failure_without_a_collective() -> None:
    answers = run_ranks(_listen, 3, timeout=40.0)
    causes = {announced for _, _, announced, _ in answers}
    assert len(causes) == 1 and causes < {"cause 0", "cause 1"}
    assert [number for number, *_ in answers] == [1] * 3
    assert {stands for _, stands, *_ in answers[:2]} == causes
    assert len({failed for *_, failed in answers}) == 1
    assert str(answers[0][3]).endswith(": no data")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (MemoryError(), True),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_failed_allocations_are_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_bad_reduction_and_a_setting_of_earlier_versions_are_named() -> None:
    with pytest.raises(ConfigError, match=r"recovery\.reduction is 1\.5"):
        InfiniPipeConfig.from_section({"recovery": {"reduction": 1.5}})
    with pytest.raises(ConfigError, match=r"recovery\.max_repeats"):
        InfiniPipeConfig.from_section({"recovery": {"max_repeats": 4}})
