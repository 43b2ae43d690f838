"""What is adapted of DeepSpeed, where no other test would see it missing."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

from ds_infinipipe.runtime.engine.module import init_distributed


def _compilations(rank: int) -> tuple[int, int, list[list[float]]]:
    """Of Muon's module when it is imported, and after two calls, with what those return."""
    init_distributed(60.0)
    with mock.patch.object(torch, "compile", side_effect=lambda function: function) as compiled:
        muon: Any = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
        importlib.reload(muon)
        at_import = compiled.call_count
        values = [muon.zeropower_via_newtonschulz5(torch.eye(2), steps=1) for _ in range(2)]
    return at_import, compiled.call_count, [value.flatten().tolist() for value in values]


@pytest.mark.ranks
def test_joining_keeps_deepspeed_from_compiling_an_optimizer_that_nobody_uses() -> None:
    ((at_import, after_calls, (first, second)),) = run_ranks(_compilations, 1)
    assert at_import == 0
    assert after_calls == 1
    assert first == second and first[0] == first[3] > 0.5
