"""A rank dies, all are started again: no sequence is lost or seen twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from restart_cases import Kill, train_through

pytestmark = [pytest.mark.ranks, pytest.mark.waits]


def test_a_run_that_is_killed_and_started_again_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    for name in ("smooth", "killed"):
        (tmp_path / name).mkdir()
    smooth = train_through(None, tmp_path / "smooth", asynchronous=False)
    killed = train_through(Kill(0, 5, "STEP"), tmp_path / "killed", asynchronous=True)
    assert killed == smooth
    assert sorted(n for step in smooth[:3] for n in step.sequences) == list(range(8))
