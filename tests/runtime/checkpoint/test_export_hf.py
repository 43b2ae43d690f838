"""From a checkpoint to a folder that transformers loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_cases import build, train
from ranks import run_strict
from transformers import AutoModelForCausalLM

from ds_infinipipe.checks.exactness import Case, Reference
from ds_infinipipe.cli import main
from ds_infinipipe.errors import CheckpointError, ConfigError
from ds_infinipipe.model.weights import check_weights
from ds_infinipipe.runtime.checkpoint.export import export_hf
from ds_infinipipe.runtime.checkpoint.folder import find_checkpoint
from ds_infinipipe.runtime.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.ranks

CASE = Case("qwen3", 2, 2, num_layers=3, tied=False, num_sequences=4, max_tokens=30)
IDS = torch.arange(40)[None] % 97


def _train_and_save(rank: int, case: Case, folder: str) -> torch.Tensor:
    """Save after two steps; returns the logits of transformers' model with the engine's weights."""
    engine = build(case)
    train(engine, case, 2)
    engine.save_checkpoint(folder)
    reference = Reference(engine, case)
    reference.copy_weights(engine)
    engine.close()
    with torch.no_grad():
        logits: torch.Tensor = reference.model(IDS).logits
    return logits


def _logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    with torch.no_grad():
        logits: torch.Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize(("pp", "tied"), [(1, False), (2, True)])
def test_the_exported_model_has_the_engines_logits(tmp_path: Path, pp: int, tied: bool) -> None:
    case = replace(CASE, pp=pp, tied=tied)
    folder = str(tmp_path / "saved")
    wanted = run_strict(_train_and_save, 2 * pp, case, folder, timeout=200.0)[0]
    assert main(["export-hf", str(tmp_path / "saved"), str(tmp_path / "whole")]) == 0
    assert torch.equal(_logits(tmp_path / "whole"), wanted)

    report = export_hf(tmp_path / "saved", tmp_path / "shards", max_shard_bytes=9000)
    assert len(report.files) > 3
    assert all((tmp_path / "shards" / name).stat().st_size < 15000 for name in report.files)
    assert torch.equal(_logits(tmp_path / "shards"), wanted)

    export_hf(tmp_path / "saved", tmp_path / "half", dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    half = _logits(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    assert float((half - wanted).abs().max()) < 0.1 * float(wanted.abs().max())

    shapes = read_manifest(find_checkpoint(tmp_path / "saved")).shapes
    check_weights(tmp_path / "shards", shapes)  # and it can be trained from again
    _refuse_bad_calls(tmp_path)


def _refuse_bad_calls(folder: Path) -> None:
    assert main(["export-hf", str(folder / "saved"), str(folder / "half")]) == 2
    assert main(["export-hf", str(folder / "none"), str(folder / "new")]) == 2
    assert main(["export-hf", str(folder / "saved"), str(folder / "new"), "--shard-gb", "0"]) == 2
    with pytest.raises(ConfigError, match="dtype 'float7' is unknown"):
        export_hf(folder / "saved", folder / "new", dtype="float7")
    place = find_checkpoint(folder / "saved") / "stage-00-shard-001.safetensors"
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes"):
        export_hf(folder / "saved", folder / "new")
    assert not (folder / "new").exists()
