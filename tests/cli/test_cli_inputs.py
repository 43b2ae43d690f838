"""Bad input ends with exit code 2 and one paragraph, before torch and processes where it can."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds_infinipipe.cli import main
from ds_infinipipe.cli.files.config import compose_config
from ds_infinipipe.cli.parts.overrides import apply_overrides
from ds_infinipipe.cli.parts.predict import predict_point
from ds_infinipipe.errors import ConfigError

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "infinipipe": {"model": {"config": TINY}, "parallel": {"pp": 2, "sp": 2}},
        **changes,
    }


def train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    *more: str,
    world_size: str = "4",
    started: Any = None,
) -> int:
    """Exit code of `train` on a rank; the part that loads torch is replaced by `started`."""
    module = ModuleType("ds_infinipipe.runtime.engine.train")
    module.train = started or (lambda _: pytest.fail("training started"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    return main(["train", "--deepspeed_config", str(file), *more])


@pytest.mark.parametrize(
    ("changes", "world_size", "expected"),
    [
        ({}, "abc", "WORLD_SIZE is 'abc'; it must be the number of ranks"),
        ({}, "0", "WORLD_SIZE is '0'"),
        ({}, "8", "pp 2 x sp 2 x dp 1 = 4 ranks, but 8 were started"),
        ({"optimizer": {"type": "Lion"}}, "4", "optimizer.type is 'Lion'"),
        (
            {"infinipipe": {"model": {"config": TINY}, "parallel": {"pp": 8}}},
            "8",
            "pp 8 is more than the 4 layers of llama",
        ),
        (
            {"infinipipe": {"model": {"config": TINY}, "parallel": {"pp": 1}}},
            "8",
            "sp 8 is more than the 4 attention heads of llama",
        ),
        (
            {"infinipipe": {"model": {"config": TINY}, "parallel": {"pp": 1}}},
            "3",
            "sp 3 cannot share 4 attention heads and 2 key/value heads",
        ),
    ],
)
def test_training_is_refused_before_it_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    world_size: str,
    expected: str,
) -> None:
    assert train(tmp_path, monkeypatch, settings(**changes), world_size=world_size) == 2
    text = capsys.readouterr().err
    assert expected in text
    assert text.count("\n") == 1


def test_training_without_an_optimizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings()
    del config["optimizer"]
    assert train(tmp_path, monkeypatch, config) == 2
    assert "there is no optimizer: give" in capsys.readouterr().err


def test_good_settings_reach_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    assert train(tmp_path, monkeypatch, settings(), "--steps", "3", started=seen.append) == 0
    assert seen[0]["infinipipe"]["training"]["steps"] == 3


def test_an_interrupt_is_quiet_and_has_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    assert train(tmp_path, monkeypatch, settings(), started=interrupt) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5"])
def test_a_batch_size_that_is_none_is_not_composed(value: str) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size is .*; give the number of sequences"):
        compose_config([f"train_batch_size={value}"])


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "1e-20", "1e30"])
def test_a_file_size_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    assert main(["export-hf", str(tmp_path), str(tmp_path / "out"), "--shard-gb", value]) == 2
    assert "--shard-gb" in capsys.readouterr().err


def test_overrides_that_are_nested_too_deeply_are_refused() -> None:
    with pytest.raises(ConfigError, match="the value of override a is no setting: it is nested"):
        apply_overrides({}, ["a=" + "[" * 5000 + "]" * 5000])
    with pytest.raises(ConfigError, match="is not an override"):
        apply_overrides({}, ["a" + ".a" * 5000 + "=1"])


@pytest.mark.parametrize("value", ["0", "abc", "1.5"])
def test_a_sweep_plans_at_least_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["sweep", f"sweep.steps={value}", f"hydra.sweep.dir={tmp_path}/out"]
    assert main(arguments) == 2
    assert "sweep.steps is" in capsys.readouterr().err


def test_predictions_know_the_older_name_of_bf16() -> None:
    older = predict_point(settings(bfloat16={"enabled": True}), "github-b:4", 1)
    newer = predict_point(settings(bf16={"enabled": True}), "github-b:4", 1)
    assert older["peak_bytes"] == newer["peak_bytes"]
    assert older["peak_bytes"] < predict_point(settings(), "github-b:4", 1)["peak_bytes"]


def test_predictions_check_the_other_settings_too() -> None:
    with pytest.raises(ConfigError, match="gradient_clipping is -1"):
        predict_point(settings(gradient_clipping=-1), "github-b:4", 1)


def test_predictions_split_no_backward_that_training_does_not() -> None:
    config = {**settings(bf16={"enabled": True}), "train_batch_size": 8}
    section = config["infinipipe"]
    section["parallel"] = {"pp": 4, "sp": 1}
    split = predict_point(config, "github-b:8", 1)
    section["planner"] = {**section.get("planner", {}), "split_backward": "never"}
    whole = predict_point(config, "github-b:8", 1)
    assert split["step_time_s"] < whole["step_time_s"]
    del section["planner"]["split_backward"]
    section["model"]["fp8"] = "row"
    fp8 = predict_point(config, "github-b:8", 1)
    assert fp8.pop("peak_bytes") > whole.pop("peak_bytes")  # the rounded operands
    assert fp8 == whole
