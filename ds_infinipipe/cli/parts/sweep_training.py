"""Training a point of a sweep: its launcher, its files, and what its log says of the steps."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.errors import ConfigError, InfiniPipeError

__all__ = ["LOG_NAME", "measured", "outputs_below", "train_point"]

logger = logging.getLogger("ds_infinipipe.sweep")

LOG_NAME = "train.log"
# loss and seconds of `StepReport.line`
_STEP = re.compile(r"step (\d+) \| loss (\S+) \|.*\| ([\d.]+) s \(predicted ")
_OUTPUTS = (
    ("training", "failure_dir"),
    ("checkpoint", "save_dir"),
    ("debug", "dump_plans"),
    ("debug", "trace"),
)


def outputs_below(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with the relative folders that training writes moved below `folder`.

    Otherwise each point would go on from the checkpoints of the one before.
    """
    settings = InfiniPipeConfig.from_deepspeed(config)
    section = dict(config.get("infinipipe", {}))
    for group, name in _OUTPUTS:
        path = getattr(getattr(settings, group), name)
        if path is not None:
            section[group] = {**section.get(group, {}), name: str(folder / path)}
    return {**config, "infinipipe": section}


def train_point(file: Path, launcher: Sequence[str], folder: Path) -> dict[str, Any]:
    """One run of the launcher, its output shown and kept in `folder`; what it measured.

    Raises InfiniPipeError with the exit code where it fails.
    """
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(launcher[0], path=beside) if launcher else None
    if program is None:
        raise ConfigError(f"sweep.launcher {list(launcher)}: there is no such program")
    tail = ["--module", "ds_infinipipe", "train", "--deepspeed_config", str(file)]
    command = [program, *launcher[1:], *_port(launcher), *tail]
    logger.info("%s", " ".join(command))
    log = folder / LOG_NAME
    with (
        open(log, "w", encoding="utf-8") as kept,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            kept.write(line)
            print(line, end="", flush=True)
    if process.returncode:
        raise InfiniPipeError(
            f"{' '.join(command)} ended with exit code {process.returncode}; its output is in {log}"
        )
    return measured(log.read_text(encoding="utf-8"))


def _port(launcher: Sequence[str]) -> list[str]:
    """A free port for the deepspeed launcher, whose own is the same for every run."""
    if Path(launcher[0]).name != "deepspeed" or any("master_port" in part for part in launcher):
        return []
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ["--master_port", str(probe.getsockname()[1])]


def measured(log: str) -> dict[str, Any]:
    """Steps, last loss and median seconds of the logged steps; empty where none was logged.

    The first step warms up and counts only where it is alone.
    """
    steps = _STEP.findall(log)
    if not steps:
        return {}
    seconds = [float(step[2]) for step in steps]
    return {
        "trained_steps": int(steps[-1][0]),
        "measured_step_time_s": statistics.median(seconds[1:] or seconds),
        "last_loss": float(steps[-1][1]),
    }
