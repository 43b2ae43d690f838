"""Inject faults into training and saving on CPU ranks, and note the outcome of each.

A fault's outcome must be the documented one: the surviving ranks end with an error that says where,
the step is skipped or refused, planning falls back, or the last good checkpoint is still whole.
Anything that outlasts its limit counts as a hang.

    python benchmarks/fault_campaign.py [--only kill,freeze,...] [--match TEXT]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "runtime")]

from checkpoint_cases import build, snapshot, train  # noqa: E402
from oom_cases import Fault, end_with_fault  # noqa: E402
from ranks import RankFailure, run_ranks  # noqa: E402
from restart_cases import STEPS, Kill, Step, train_through  # noqa: E402
from test_checkpoint import CASE  # noqa: E402
from test_failures import _run_casualty  # noqa: E402
from test_planning import _plan_with  # noqa: E402
from test_running import _nonfinite  # noqa: E402

from ds_infinipipe.errors import InfiniPipeError  # noqa: E402

OOM_CASES = {
    "2 x 2, float64": {"zero_stage": 0, "float64": True, "seed": 5},
    "2 x 2, ZeRO-3": {"seed": 6},
}
OOM_FAULTS = (
    Fault((0,), "embedding"),
    Fault((1,), "forward", nth=3),
    Fault((3,), "head", is_after=True),
    Fault((2,), "recompute"),
    Fault((0, 1, 2, 3), "backward", is_after=True),
    Fault((2,), "receive"),
    Fault((0,), "send", is_after=True),
    Fault((0, 3), "sum"),
    Fault((1,), "gather", nth=4),
    Fault((2,), "reduce", nth=2),
    Fault((1,), "optimizer"),
    Fault((0,), "input gradients"),
    Fault((3,), "weight gradients"),
)
KILLS = (
    Kill(0, 4, "F"),
    Kill(1, 4, "RECV_F"),
    Kill(1, 3, "SEND_B"),
    Kill(0, 5, "STEP"),
    Kill(0, 4, writes=1),
    Kill(1, 4, writes=2),
    Kill(1, 2, writes=1),
    Kill(0, 5, runs_out=True),
    Kill(1, 6, runs_out=True),
)
RESULT = Path(__file__).parent / "results" / "fault_campaign.json"
LIMIT_S = 120.0
FIRST_STAGE_OPS = ("F", "B", "SEND_F", "RECV_B", "STEP")
LAST_STAGE_OPS = ("F", "B", "RECV_F", "SEND_B", "STEP")
WORKERS = {
    "late": "import time; time.sleep(60)",
    "dead": "raise SystemExit(3)",
    "no JSON": "print('no json')",
    "killed": "import os, signal, sys; sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)",
    "out of memory": "import sys; sys.stdin.readline(); raise MemoryError",
}


@dataclass(frozen=True)
class Outcome:
    """What one fault led to; `result` is "as documented", "hang" or what went wrong."""

    kind: str
    fault: str
    result: str
    seconds: float


def main() -> int:
    """Run the campaign, print a table, write the result; 1 if anything was not as documented."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated kinds")
    parser.add_argument("--match", default="", help="a part of the fault's name")
    args = parser.parse_args()
    wanted = set(filter(None, args.only.split(",")))
    outcomes = []
    for kind, fault, run in _faults():
        if (not wanted or kind in wanted) and args.match in fault:
            outcomes.append(_inject(kind, fault, run))
            print(f"{kind:12s} {fault:44s} {outcomes[-1].result}", flush=True)
            _write(outcomes)
    counts = Counter("as documented" if o.result == "as documented" else "other" for o in outcomes)
    hangs = sum(o.result == "hang" for o in outcomes)
    print(f"{len(outcomes)} faults: {counts['as documented']} as documented, {hangs} hangs")
    return 1 if counts["other"] else 0


def _write(outcomes: list[Outcome]) -> None:
    """Into the result, over what it has of the same faults."""
    rows = [{**asdict(o), "command": " ".join(sys.argv)} for o in outcomes]
    if RESULT.exists():
        before = json.loads(RESULT.read_text(encoding="utf-8"))
        new = {(row["kind"], row["fault"]) for row in rows}
        kept = [row for row in before["outcomes"] if (row["kind"], row["fault"]) not in new]
        rows = [{"command": before.get("command", ""), **row} for row in kept] + rows
    RESULT.write_text(json.dumps({"outcomes": rows}, indent=1) + "\n", encoding="utf-8")


def _inject(kind: str, fault: str, run: Callable[[Path], None]) -> Outcome:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(Path(folder))
            result = "as documented"
        except TimeoutError as error:
            result = f"hang: {error}"
        except Exception as error:
            result = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    seconds = time.monotonic() - started
    return Outcome(kind, fault, "hang" if seconds > LIMIT_S else result, round(seconds, 1))


def _faults() -> Iterator[tuple[str, str, Callable[[Path], None]]]:
    for rank in range(4):
        for op in FIRST_STAGE_OPS if rank < 2 else LAST_STAGE_OPS:
            yield "kill", f"rank {rank} at {op}", _casualty(rank, op, signal.SIGKILL)
    for rank in (0, 3):
        for op in FIRST_STAGE_OPS if rank < 2 else LAST_STAGE_OPS:
            yield "freeze", f"rank {rank} at {op}", _casualty(rank, op, signal.SIGSTOP)
    for policy in ("skip", "stop"):
        for repeat in range(2):
            yield "nonfinite", f"infinite gradient, {policy}, {repeat}", _infinite(policy)
    for name, script in WORKERS.items():
        yield "planning", f"worker {name}", _late_worker(script)
    for damage in ("flip", "cut", "empty", "remove"):
        for file in range(4):
            yield "checkpoint", f"{damage} file {file}", _damaged(damage, file)
    for rank in (0, 1):
        for writes in (1, 2, 3):
            yield "saving", f"rank {rank} killed at write {writes}", _killed_saving(rank, writes)
        yield "saving", f"disk full on rank {rank}", _disk_full(rank)
    for asynchronous in (False, True):
        for kill in KILLS:
            beside = ", saving beside training" if asynchronous else ""
            yield "restart", f"{kill}{beside}", _restarted(kill, asynchronous)
    for name, fields in OOM_CASES.items():
        for fault in OOM_FAULTS:
            ranks = ", ".join(map(str, fault.ranks))
            yield "memory", f"{name}: {fault.place} on {ranks}", _out_of_memory(fields, fault)


def _casualty(rank: int, op: str, sign: int) -> Callable[[Path], None]:
    return lambda folder: _expect(len(_run_casualty(rank, op, sign, folder, timeout=60.0)) == 3)


def _out_of_memory(fields: dict[str, Any], fault: Fault) -> Callable[[Path], None]:
    """All ranks end with the error that names the memory, and leave a lower limit."""
    from ds_infinipipe.checks.exactness import Case
    from ds_infinipipe.runtime.checkpoint.memory_limit import read_memory_limit

    def run(folder: Path) -> None:
        section = {"checkpoint": {"save_dir": str(folder)}}
        messages = run_ranks(end_with_fault, 4, Case(**fields), fault, section, timeout=110.0)
        _expect(len(set(messages)) == 1 and messages[0].startswith("OutOfMemoryError"))
        _expect(read_memory_limit(folder) is not None)

    return run


@functools.cache
def _uninterrupted() -> list[Step]:
    with tempfile.TemporaryDirectory() as folder:
        return train_through(None, Path(folder), asynchronous=False)


def _restarted(kill: Kill, asynchronous: bool) -> Callable[[Path], None]:
    """Started again, the run trains on the same sequences, bit for bit as without the fault."""

    def run(folder: Path) -> None:
        found, wanted = train_through(kill, folder, asynchronous=asynchronous), _uninterrupted()
        _expect([s.sequences for s in found] == [s.sequences for s in wanted])
        _expect(len(wanted) == STEPS)
        # a step planned within less adds up in another order
        limit = 1e-5 if kill.runs_out else 0.0
        _expect(all(abs(f.loss - w.loss) <= limit for f, w in zip(found, wanted, strict=True)))

    return run


def _infinite(policy: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        for message, norms, skipped in run_ranks(_nonfinite, 2, policy, str(folder), timeout=90.0):
            _expect(bool(message) == (policy == "stop") and skipped == (policy == "skip"))
            _expect(len(norms) == (3 if policy == "skip" else 1))

    return run


def _late_worker(script: str) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        answers = run_ranks(_plan_with, 2, script, 1.0, timeout=90.0)
        _expect(len({digest for digest, *_ in answers}) == 1)
        _expect(all(is_fallback for _, is_fallback, *_ in answers))

    return run


def _damaged(damage: str, file: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        for message, unchanged in run_ranks(
            _load_damaged, 2, str(folder), damage, file, timeout=110.0
        ):
            _expect(bool(message) and unchanged)

    return run


def _load_damaged(rank: int, folder: str, damage: str, number: int) -> tuple[str, bool]:
    """Save, damage one file, try to load: the error, and whether the state is as before."""
    import torch

    engine = build(CASE)
    engine.save_checkpoint(folder, tag="good")
    train(engine, CASE, 1)
    before = snapshot(engine)
    if rank == 0:
        files = sorted(p for p in (Path(folder) / "good").iterdir() if p.is_file())
        _damage(files[number % len(files)], damage)
    torch.distributed.barrier()
    message = ""
    try:
        engine.load_checkpoint(folder, "good")
    except InfiniPipeError as error:
        message = str(error)
    unchanged = all(torch.equal(before[key], value) for key, value in snapshot(engine).items())
    engine.close()
    return message, unchanged


def _damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) * 2 // 3] ^= 1
        file.write_bytes(content)


def _killed_saving(rank: int, writes: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        # the casualty, or what its peer met
        with contextlib.suppress(RankFailure, InfiniPipeError, RuntimeError):
            run_ranks(_save_and_die, 2, str(folder), rank, writes, timeout=60.0)
        names = run_ranks(_load_and_save, 2, str(folder), timeout=90.0)
        _expect(all(name in ("good", "other") for name in names))

    return run


def _save_and_die(rank: int, folder: str, victim: int, writes: int) -> None:
    from ds_infinipipe.runtime.checkpoint import tensor_file

    engine = build(CASE)
    engine.save_checkpoint(folder, tag="good")
    write, count = tensor_file._write_all, [0]

    def write_and_die(file: Any, content: memoryview) -> None:
        write(file, content)
        count[0] += 1
        if rank == victim and count[0] == writes:
            os.kill(os.getpid(), signal.SIGKILL)

    tensor_file._write_all = write_and_die
    engine.save_checkpoint(folder, tag="other")


def _load_and_save(rank: int, folder: str) -> str:
    engine = build(CASE)
    place, _ = engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, tag="third")
    engine.load_checkpoint(folder, "third")
    engine.close()
    return Path(place).name


def _disk_full(rank: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        for message in run_ranks(_fill_disk, 2, str(folder), rank, timeout=90.0):
            _expect("no space is left" in message)
        names = run_ranks(_load_and_save, 2, str(folder), timeout=90.0)
        _expect(all(name == "good" for name in names))
        shutil.rmtree(folder / "third")

    return run


def _fill_disk(rank: int, folder: str, victim: int) -> str:
    from ds_infinipipe.runtime.checkpoint import tensor_file

    engine = build(CASE)
    engine.save_checkpoint(folder, tag="good")
    if rank == victim:
        opened = tensor_file.open_new
        tensor_file.open_new = lambda _: opened(Path("/dev/full"))
    try:
        engine.save_checkpoint(folder, tag="other")
    except InfiniPipeError as error:
        return str(error)
    return ""


def _expect(holds: bool) -> None:
    if not holds:
        raise RuntimeError("the outcome is not the documented one")


if __name__ == "__main__":
    sys.exit(main())
