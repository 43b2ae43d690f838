"""A rank that dies or freezes: the others stop, and say what they were waiting for."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
from ranks import RankFailure, run_ranks

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.errors import InfiniPipeError
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.stage.step import StepRun

pytestmark = [pytest.mark.ranks, pytest.mark.waits]

_TIMEOUT_S = 4.0
_CASE = Case("llama", 2, 2, num_layers=2)


def _engine() -> InfiniPipeEngine:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    config = exactness.make_config(_CASE)
    config["infinipipe"]["runtime"]["timeout_s"] = _TIMEOUT_S
    config["infinipipe"]["planning"]["deadline_s"] = 1.0
    return exactness.engine_from_config(config, _CASE.dtype)


def _train_with_a_casualty(rank: int, victim: int, op: str, sign: int, folder: str) -> None:
    """Train; the victim kills or stops itself at its first instruction of kind `op`.

    The last of the others ends a victim that is stopped, for which the test would wait.
    """
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    engine = _engine()
    do = StepRun.do

    def do_or_die(run, instruction, position):  # type: ignore[no-untyped-def]
        if instruction.op is Op(op):
            os.kill(os.getpid(), sign)
        do(run, instruction, position)

    if rank == victim:
        StepRun.do = do_or_die  # type: ignore[method-assign]
    batch = exactness.random_batch(_CASE, 0)
    started = time.monotonic()
    try:
        for _ in range(3):
            engine.train_plan(exactness.draw_plan(engine, _CASE, batch, 0), batch)
    except InfiniPipeError as error:
        elapsed = time.monotonic() - started
        Path(folder, f"rank{rank}").write_text(f"{elapsed:.2f} {type(error).__name__} {error}")
    if len(list(Path(folder).glob("rank*"))) == 3:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(Path(folder, f"pid{victim}").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("op", "victim"), [("F", 1), ("B", 2), ("SEND_F", 1), ("RECV_B", 0), ("STEP", 3)]
)
def test_when_a_rank_is_killed_the_others_name_instruction_chunk_and_peer(
    op: str, victim: int, tmp_path: Path
) -> None:
    _run_casualty(victim, op, signal.SIGKILL, tmp_path)


def test_when_a_rank_freezes_the_others_give_up_after_the_timeout(tmp_path: Path) -> None:
    # rank 0 serves the rendezvous store, whose clients would wait for it without end
    reports = _run_casualty(0, "B", signal.SIGSTOP, tmp_path)
    assert all(float(text.split()[0]) < 5 * _TIMEOUT_S for text in reports)


def _run_casualty(
    victim: int, op: str, sign: int, folder: Path, timeout: float = 30.0
) -> list[str]:
    grace_s = 30.0 if sign == signal.SIGKILL else 1.0
    with pytest.raises((RankFailure, TimeoutError)):
        run_ranks(
            _train_with_a_casualty,
            4,
            victim,
            op,
            int(sign),
            str(folder),
            timeout=timeout,
            grace_s=grace_s,
        )
    reports = [(folder / f"rank{rank}").read_text() for rank in range(4) if rank != victim]
    for text in reports:
        assert "PeerTimeoutError" in text
        assert "at instruction" in text
        assert "peer rank" in text or "in a collective with ranks" in text
        assert "ranks" in text
    return reports
