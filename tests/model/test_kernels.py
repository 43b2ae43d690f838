"""Whose norm, rotary embedding and SwiGLU run. What Liger's compute is in `liger_cases.py`."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_reference import tiny_config

from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.hf import load_hf_config
from ds_infinipipe.model.liger import resolve_kernels

CONFIG = load_hf_config(tiny_config("llama"))


def test_auto_takes_torch_on_a_cpu() -> None:
    assert resolve_kernels("auto", CONFIG, "cpu", torch.float32) == "torch"
    assert resolve_kernels("torch", CONFIG, "cuda", torch.bfloat16) == "torch"


def test_liger_is_refused_on_a_cpu() -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    with pytest.raises(ConfigError, match="cannot run on cpu: it needs a CUDA device"):
        resolve_kernels("liger", CONFIG, "cpu", torch.float32)


def test_liger_that_is_missing_is_refused_by_name_and_passed_over_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_spec(name: str, *rest: Any) -> Any:
        return None if name == "liger_kernel" else find(name, *rest)

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert resolve_kernels("auto", CONFIG, "cuda", torch.bfloat16) == "torch"
    with pytest.raises(ConfigError, match=r"liger-kernel is not installed \(pip install"):
        resolve_kernels("liger", CONFIG, "cuda", torch.bfloat16)


@pytest.mark.parametrize(("kind", "chosen"), [("llama", "liger"), ("plain", "torch")])
def test_auto_passes_liger_over_for_families_it_has_no_kernels_for(
    monkeypatch: pytest.MonkeyPatch, kind: str, chosen: str
) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    monkeypatch.setattr("ds_infinipipe.model.liger.triton_obstacle", lambda device_type: None)
    config: Any = SimpleNamespace(hidden_act="silu", model_type=kind)
    assert resolve_kernels("auto", config, "cuda", torch.bfloat16) == chosen


@pytest.mark.parametrize(("kernels", "is_fused"), [("liger", True), ("torch", False)])
def test_the_planner_counts_the_activations_of_the_kernels(kernels: str, is_fused: bool) -> None:
    model = {"config": tiny_config("llama"), "kernels": kernels}
    section = InfiniPipeConfig.from_section({"model": model})
    assert section.execution({}, 2).fused_kernels == is_fused
