"""The fixed batches: the same each time, and a plan that changed is noticed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_digests.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_digests", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def test_the_batches_are_two_hundred_of_all_kinds_under_names_of_their_own(
    script: ModuleType,
) -> None:
    batches = list(script.batches())
    assert len({batch.name for batch in batches}) == 200
    assert {batch.model for batch in batches} == set(script.MODELS)
    assert {batch.degrees for batch in batches} == set(script.LAYOUTS)
    assert {batch.settings.mode for batch in batches} == {"lean", "paper"}
    assert {batch.zero_stage for batch in batches} == {0, 3}
    assert all(batch.settings.deadline_s is None for batch in batches)
    assert batches == list(script.batches())


def test_equal_plans_compare_equal_and_another_decision_is_named(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, only = tmp_path / "known.json", "014 "
    assert script.main(["--only", only, "--out", str(known)]) == 0
    assert script.main(["--only", only, "--against", str(known)]) == 0
    assert "0 of 1 differ" in capsys.readouterr().out
    rows = json.loads(known.read_text())
    for key, text in (("digest", ": digest differ"), ("decided", ": decided differ")):
        changed = [{**rows[0], key: "0" * 64}]
        known.write_text(json.dumps(changed))
        assert script.main(["--only", only, "--against", str(known)]) == 1
        assert text in capsys.readouterr().out
    known.write_text("[]")
    assert script.main(["--only", only, "--against", str(known)]) == 1
    assert "1 of 1 differ" in capsys.readouterr().out
