"""Hydra multirun: compose a JSON for each point, predict its steps, and train it if asked to.

infinipipe sweep planner=lean,full_recompute sweep.lengths=github-b:64
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_infinipipe.cli.config import CONFIG_MODULE, allow_new_keys, config_text
from ds_infinipipe.errors import ConfigError, InfeasiblePlanError, InfiniPipeError

__all__ = ["add_arguments", "run"]

logger = logging.getLogger("ds_infinipipe.sweep")

_RUNS = ("plan", "train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="GROUP=A,B|KEY=VALUE",
        help="Hydra overrides; commas make points; Hydra's own options such as -m may stand beside",
    )


def run(args: argparse.Namespace) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    outcomes: list[dict[str, Any]] = []

    @hydra.main(config_path=f"pkg://{CONFIG_MODULE}", config_name="sweep", version_base="1.3")
    def point(composed: DictConfig) -> None:
        config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        assert isinstance(config, dict)
        settings = HydraConfig.get()
        folder = Path(settings.runtime.output_dir)
        outcome = _run_point({str(k): config[k] for k in config}, folder)
        outcomes.append({"overrides": tuple(settings.overrides.task), **outcome})

    with _hydra_call(args.rest):
        try:
            point()
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(" ".join(str(error).split())) from error
    print(_table(outcomes))
    return 0


@contextlib.contextmanager
def _hydra_call(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and exits by itself on errors unless told to let them through."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["infinipipe sweep", *allow_new_keys(arguments)]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]


def _run_point(composed: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write a point's JSON, predict its steps, and start training where `sweep.run` says so."""
    wanted = composed.pop("sweep")
    if wanted["run"] not in _RUNS:
        raise ConfigError(f"sweep.run is {wanted['run']!r}; choose {' or '.join(_RUNS)}")
    file = folder / "deepspeed.json"
    file.write_text(config_text(composed), encoding="utf-8")
    from ds_infinipipe.cli.predict import predict_point

    try:
        outcome = predict_point(composed, str(wanted["lengths"]), int(wanted["steps"]))
    except InfeasiblePlanError as error:
        # a limit that a setting runs into is what a sweep is meant to find
        outcome = {"status": "infeasible", "reason": str(error)}
    (folder / "prediction.json").write_text(json.dumps(outcome, indent=2), encoding="utf-8")
    if wanted["run"] == "train" and outcome["status"] == "planned":
        _train(file, [str(part) for part in wanted["launcher"]])
    return {**outcome, "folder": str(folder)}


def _train(file: Path, launcher: Sequence[str]) -> None:
    """One run of the launcher; raises InfiniPipeError with its exit code where it fails."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(launcher[0], path=beside) if launcher else None
    if program is None:
        raise ConfigError(f"sweep.launcher {list(launcher)}: there is no such program")
    tail = ["--module", "ds_infinipipe", "train", "--deepspeed_config", str(file)]
    command = [program, *launcher[1:], *tail]
    logger.info("%s", " ".join(command))
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise InfiniPipeError(f"{' '.join(command)} ended with exit code {done.returncode}")


def _table(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """One line a point, named by the overrides that not all points share."""
    shared = set.intersection(*(set(o["overrides"]) for o in outcomes)) if outcomes else set()
    rows = [("point", "status", "step s", "tokens/s", "bubble", "peak GiB", "recomputed layers")]
    for o in outcomes:
        point = " ".join(t.lstrip("+") for t in o["overrides"] if t not in shared) or "as composed"
        if o["status"] != "planned":
            rows.append((point, o["status"], "-", "-", "-", "-", "-"))
            continue
        rows.append(
            (
                point,
                o["status"],
                f"{o['step_time_s']:.3f}",
                f"{o['tokens_per_s']:.0f}",
                f"{o['bubble_ratio']:.1%}",
                f"{o['peak_bytes'] / 2**30:.2f}",
                str(o["recomputed_layers"]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows
    )
