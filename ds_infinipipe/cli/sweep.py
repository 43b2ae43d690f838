"""Hydra multirun: compose a JSON for each point, predict its steps, and train it if asked to.

infinipipe sweep planner=lean,full_recompute sweep.lengths=github-b:64
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_infinipipe.cli.files.config import CONFIG_MODULE, allow_new_keys, config_text
from ds_infinipipe.cli.parts.sweep_training import LOG_NAME, outputs_below, train_point
from ds_infinipipe.errors import ConfigError, InfeasiblePlanError

__all__ = ["add_arguments", "run"]

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
    trains = wanted["run"] == "train"
    if trains:
        composed = outputs_below(composed, folder)
    file = folder / "deepspeed.json"
    file.write_text(config_text(composed), encoding="utf-8")
    from ds_infinipipe.cli.parts.predict import predict_point

    source, steps = str(wanted["lengths"]), _steps(wanted["steps"])
    try:
        outcome = predict_point(composed, source, steps)
    except InfeasiblePlanError as error:
        # a limit that a setting runs into is what a sweep is meant to find
        outcome = {"status": "infeasible", "reason": str(error)}
    outcome |= {"lengths": source, "steps": steps, "folder": str(folder), "trains": trains}
    (folder / "prediction.json").write_text(json.dumps(outcome, indent=2), encoding="utf-8")
    if trains and outcome["status"] == "planned":
        found = train_point(file, [str(part) for part in wanted["launcher"]], folder)
        (folder / "measured.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
        outcome |= found
    return outcome


def _steps(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"sweep.steps is {value!r}; it must be an integer of at least 1, the batches that are "
            "planned"
        )
    return value


def _table(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """What was predicted, and one line a point, named by the overrides that not all share."""
    shared = set.intersection(*(set(o["overrides"]) for o in outcomes)) if outcomes else set()
    trains = any(o["trains"] for o in outcomes)
    measured = ("measured s", "last loss") if trains else ()
    head = ("sequences", "tokens", "step s", *measured, "tokens/s", "bubble", "peak GiB")
    rows = [("point", "status", *head, "recomputed layers")]
    for o in outcomes:
        point = " ".join(t.lstrip("+") for t in o["overrides"] if t not in shared) or "as composed"
        cells = _figures(o, trains) if o["status"] == "planned" else ("-",) * (len(rows[0]) - 2)
        rows.append((point, o["status"], *cells))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["", *_notes(outcomes, trains), "", *(line.rstrip() for line in lines)])


def _figures(outcome: Mapping[str, Any], trains: bool) -> tuple[str, ...]:
    measured: tuple[str, ...] = ()
    if trains:
        has_steps = "last_loss" in outcome
        measured = (
            f"{outcome['measured_step_time_s']:.3f}" if has_steps else "-",
            f"{outcome['last_loss']:.4f}" if has_steps else "-",
        )
    return (
        f"{outcome['sequences']:,}",
        f"{outcome['tokens']:,}",
        f"{outcome['step_time_s']:.3f}",
        *measured,
        f"{outcome['tokens_per_s']:,.0f}",
        f"{outcome['bubble_ratio']:.1%}",
        f"{outcome['peak_bytes'] / 2**30:.2f}",
        str(outcome["recomputed_layers"]),
    )


def _notes(outcomes: Sequence[Mapping[str, Any]], trains: bool) -> list[str]:
    """Which batches the figures are of; all points have the same sources."""
    if not outcomes:
        return []
    first = outcomes[0]
    count = "the first batch" if first["steps"] == 1 else f"the first {first['steps']} batches"
    of = "the corpus" if first["lengths"] == "corpus" else first["lengths"]
    kernels = {o["memory"] for o in outcomes if "memory" in o}
    notes = [f"predicted for {count} of {of}", *(f"memory {note}" for note in sorted(kernels))]
    if trains:
        same = "" if first["lengths"] == "corpus" else ", on the corpus, which is another batch"
        notes.append(f"measured: median of the steps after the first{same}; logs: {LOG_NAME}")
    notes.append(f"files in {Path(first['folder']).parent}")
    return notes
