"""A corpus and a run small enough to train under a launcher in a test."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_infinipipe.cli.files.config import compose_config

CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def make_corpus(folder: Path) -> Path:
    """Documents of 2 to 900 bytes, most of them short, as text and as JSONL."""
    folder.mkdir()
    for number, size in enumerate((2, 30, 90, 40, 900, 15, 260, 120, 700, 61, 45, 333)):
        text = f"{number} the cat sat on the mat. " * 99
        (folder / f"{number:02d}.txt").write_bytes(text.encode()[:size])
    rows = [{"text": f"a line of its own, number {n}"} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tiny_run(corpus: Path, *overrides: str) -> dict[str, Any]:
    """The quickstart's JSON with that corpus."""
    config = compose_config(["experiment=quickstart", f"infinipipe.data.path={corpus}", *overrides])
    config["infinipipe"]["data"] |= {"context_length": 900, "over_length": "split"}
    config["infinipipe"]["runtime"] = {"timeout_s": 60.0}
    return config


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_with(variable: str) -> dict[int, dict[str, str]]:
    """Environments by process id of all processes that have `variable`, as "NAME=value"."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_text(errors="replace").split("\0")
        except OSError:  # it ended, or is not ours
            continue
        if variable in entries and int(folder.name) != os.getpid():
            found[int(folder.name)] = dict(e.split("=", 1) for e in entries if "=" in e)
    return found


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """False when it did not hold within the time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
