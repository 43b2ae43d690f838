"""What would fail later, or train apart silently, is refused before the first step on all ranks."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.errors import InfiniPipeError
from ds_infinipipe.runtime.engine.initialize import initialize
from ds_infinipipe.runtime.engine.module import InfiniPipeModule
from ds_infinipipe.runtime.ranks.agree import check_writable

pytestmark = pytest.mark.ranks

_CASE = Case("llama", 2, 1, num_layers=2)


class _Documents:
    """Random sequences of given lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = np.array(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": np.arange(self.lengths[index]) % 97}


def _start(rank: int, kind: str) -> str:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    config = exactness.make_config(_CASE)
    documents = _Documents(5, 9, 200)
    if kind == "other learning rate":
        config["optimizer"]["params"]["lr"] *= 1 + rank
    elif kind == "beyond positions":
        documents = _Documents(5, 9, 241)
    elif kind == "beyond memory":
        config["infinipipe"]["planner"]["memory_limit_gib"] = 0.0007
        config["infinipipe"]["planner"]["max_slices"] = 1
    elif kind == "unknown optimizer option":
        config["optimizer"]["params"]["momentums"] = 3
    elif kind == "fp8 in float32":
        config["infinipipe"]["model"]["fp8"] = "row"
    elif kind == "triton on a cpu":
        config["infinipipe"]["runtime"]["cross_entropy"] = "triton"
    elif kind == "liger on a cpu":
        config["infinipipe"]["model"]["kernels"] = "liger"
    try:
        model = InfiniPipeModule(config)
        engine = initialize(model=model, config=config, training_data=documents)[0]
    except InfiniPipeError as error:
        return f"{error.exit_code} {error}"
    engine.close()
    return "started"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other learning rate", "2 ranks 0 and 1 have different configurations: optimizer"),
        ("beyond positions", "sequence 2 has 241 tokens, but the model has positions for 240"),
        ("beyond memory", "3 "),
        ("unknown optimizer option", "momentums"),
        ("fp8 in float32", "infinipipe.model.fp8 needs bf16 training"),
        ("triton on a cpu", "cross-entropy backend 'triton' cannot run on cpu"),
        ("liger on a cpu", "infinipipe.model.kernels is liger, but"),
        ("nothing wrong", "started"),
    ],
)
def test_a_start_that_cannot_work_is_refused_on_every_rank(kind: str, message: str) -> None:
    answers = run_ranks(_start, 2, kind, timeout=90.0)
    for answer in answers:
        assert message in answer
        assert kind != "beyond memory" or answer.startswith("3 ")


def _write(rank: int, folder: str) -> str:
    try:
        check_writable(folder, "infinipipe.debug.trace")
    except InfiniPipeError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    for message in run_ranks(_write, 2, str(tmp_path / "file"), timeout=60.0):
        assert "infinipipe.debug.trace is" in message and "nothing can be written" in message
    assert run_ranks(_write, 2, str(tmp_path / "new"), timeout=60.0) == ["", ""]
