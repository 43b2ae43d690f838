"""`infinipipe calibrate`: measures this machine, and plan takes what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_infinipipe.cli import main
from ds_infinipipe.planner.clusters import load_cluster

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 65536,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def test_what_is_written_is_a_cluster_that_plans(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "cluster.json")
    assert main(["calibrate", "--model", model, "--budget-s", "8", "-o", output]) == 0
    said = capsys.readouterr().out
    assert "512+512+512+512" in said or "128+128+128+128" in said
    assert "64 over 448" in said and "median error" in said and "not measured" in said
    cluster = load_cluster(output)
    assert cluster.name == "cpu-local, calibrated" and cluster.linear_efficiency > 0
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n900\n", encoding="utf-8")
    plan = ["plan", "--lengths", str(lengths), "--model", model, "--cluster", output, "--pp", "2"]
    assert main(plan) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--budget-s", "0"], "--budget-s 0: from 1 second"),
        (["--base-cluster", "nowhere"], "cluster 'nowhere' is neither a file nor a built-in"),
        (["-o", "/nowhere/cluster.json"], "the folder does not exist"),
        (["--model", "nothing.json"], "neither a file nor a built-in name"),
    ],
)
def test_bad_input_is_named_before_anything_is_measured(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: list[str],
    message: str,
) -> None:
    given = ["calibrate", "--model", model, "-o", str(tmp_path / "c.json"), *changed]
    assert main(given) == 2
    assert message in capsys.readouterr().err
