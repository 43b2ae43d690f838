"""Runs that are killed at some point and started again from what they had saved."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_cases import Numbered, build
from oom_cases import Fault, inject
from ranks import RankFailure, run_ranks

from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.errors import InfiniPipeError
from ds_infinipipe.planner.plan.stream import Op
from ds_infinipipe.runtime.checkpoint import tensor_file
from ds_infinipipe.runtime.checkpoint.routine import CheckpointRoutine
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine
from ds_infinipipe.runtime.stage.step import StepRun

STEPS = 7
_NUM_SEQUENCES = 8
_CASE = Case("llama", 2, 1, num_layers=2, num_heads=2, num_sequences=3, max_tokens=30)


@dataclass(frozen=True)
class Kill:
    """A rank ends itself at an instruction of a step, or after so many writes of one's saving.

    With `runs_out` it runs out of memory in that step instead, and all ranks end.
    """

    rank: int
    step: int
    op: str = ""
    writes: int = 0
    runs_out: bool = False

    def __str__(self) -> str:
        if self.runs_out:
            return f"rank {self.rank} out of memory, step {self.step}"
        place = f"at {self.op}" if self.op else f"at write {self.writes} of saving"
        return f"rank {self.rank} killed {place}, step {self.step}"


@dataclass(frozen=True)
class Step:
    """What a step trained on and what came out, the same on every rank."""

    step: int
    sequences: tuple[int, ...]
    loss: float
    limit_bytes: int
    """Of the step's plan."""


def _run(rank: int, folder: str, asynchronous: bool, kill: Kill | None) -> None:
    """Train up to STEPS, saving every other one; each step that ends is a line in a file."""
    saving = {"save_dir": folder, "every_steps": 2, "asynchronous": asynchronous}
    section = {"checkpoint": saving, "planning": {"asynchronous": True, "deadline_s": 60.0}}
    section["recovery"] = {"reduction": 0.99}
    engine = build(_CASE, Numbered(_NUM_SEQUENCES, _CASE.vocab_size), section)
    routine = CheckpointRoutine(engine.checkpointer, engine.settings.checkpoint)
    routine.resume(STEPS)
    if kill is not None and rank == kill.rank and not kill.runs_out:
        _prepare(engine, kill)
    with open(f"{folder}-rank{rank}", "a", encoding="utf-8") as file:
        while engine.global_steps < STEPS:
            step = engine.global_steps + 1
            if kill is not None and kill.runs_out and step == kill.step:
                inject(engine, Fault((kill.rank,), "backward"))
            loss = float(engine.train_batch())
            assert engine.plan is not None
            ids = tuple(int(ids[0]) for ids in engine._whole_batch.ids)
            limit_bytes = engine.plan.setup.limit_bytes
            print(json.dumps([step, ids, loss, limit_bytes]), file=file, flush=True)
            routine.after_step()
        routine.at_end()
    engine.close()


def _prepare(engine: InfiniPipeEngine, kill: Kill) -> None:
    do, write, writes = StepRun.do, tensor_file._write_all, [0]

    def do_or_die(run: StepRun, instruction: Any, position: int) -> None:
        if engine.global_steps + 1 == kill.step and instruction.op is Op(kill.op):
            os.kill(os.getpid(), signal.SIGKILL)
        do(run, instruction, position)

    def write_and_die(file: Any, content: memoryview) -> None:
        write(file, content)
        if engine.global_steps >= kill.step:
            writes[0] += 1
            if writes[0] == kill.writes:
                os.kill(os.getpid(), signal.SIGKILL)

    if kill.op:
        StepRun.do = do_or_die  # type: ignore[method-assign]
    else:
        tensor_file._write_all = write_and_die


def train_through(kill: Kill | None, folder: Path, *, asynchronous: bool) -> list[Step]:
    """The steps that the weights at the end have seen, in their order."""
    saved = folder / "saved"
    if kill is not None:
        # the casualty, or what its peer met
        with contextlib.suppress(RankFailure, InfiniPipeError, RuntimeError):
            run_ranks(_run, 2, str(saved), asynchronous, kill, timeout=100.0, grace_s=10.0)
        assert len(_read(folder / f"saved-rank{kill.rank}")) < STEPS, "the rank was not killed"
    run_ranks(_run, 2, str(saved), asynchronous, None, timeout=100.0)
    by_rank = [_read(folder / f"saved-rank{rank}") for rank in range(2)]
    assert by_rank[0] == by_rank[1]
    return by_rank[0]


def _read(file: Path) -> list[Step]:
    """A step that was trained again takes the place of those from it on."""
    steps: list[Step] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        number, ids, loss, limit_bytes = json.loads(line)
        steps = [*steps[: number - 1], Step(number, tuple(ids), loss, limit_bytes)]
        assert len(steps) == number, "a step is missing"
    return steps
