"""A step on disk, plan and batch, so that it can be run again alone."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ds_infinipipe.errors import DataError, ScheduleError
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.verify.frame import verify_plan
from ds_infinipipe.runtime.stage.batch import StepBatch

__all__ = ["load_step", "save_step"]


def save_step(folder: str | Path, name: str, plan: Plan, batch: StepBatch) -> Path:
    """Write `<name>.json` (the plan) and `<name>.npz` (ids and shifted labels); returns the first.

    `batch` is what the plan was made for: with replicas, one replica's share.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"ids_{i}": ids for i, ids in enumerate(batch.ids)}
    arrays.update({f"labels_{i}": labels for i, labels in enumerate(batch.labels)})
    arrays.update({f"weights_{i}": weights for i, weights in enumerate(batch.weights)})
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    path = folder / f"{name}.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return path


def load_step(path: str | Path) -> tuple[Plan, StepBatch]:
    """Read what `save_step` wrote, by the path of the plan.

    Raises DataError where plan and batch do not belong together, one is missing or damaged, or the
    plan breaks a rule of the verifier.
    """
    path = Path(path)
    arrays_path = path.with_suffix(".npz")
    for file in (path, arrays_path):
        if not file.is_file():
            raise DataError(f"{file} does not exist; a recorded step is a .json and a .npz file")
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
        verify_plan(plan)
    except (ScheduleError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error
    try:
        with np.load(arrays_path) as arrays:
            ids = tuple(arrays[f"ids_{i}"] for i in range(len(plan.lengths)))
            labels = tuple(arrays[f"labels_{i}"] for i in range(len(plan.lengths)))
            names = [f"weights_{i}" for i in range(len(plan.lengths)) if "weights_0" in arrays]
            weights = tuple(arrays[name] for name in names)
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{arrays_path} is damaged or of another step: {error}") from error
    batch = StepBatch(ids, labels, weights)
    if batch.lengths != plan.lengths:
        raise DataError(f"{arrays_path} has other sequence lengths than the plan {path}")
    return plan, batch
