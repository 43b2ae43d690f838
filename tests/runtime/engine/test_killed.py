"""A rank dies or runs out of memory, all are started again: no sequence is lost or seen twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from restart_cases import Kill, Step, train_through

from ds_infinipipe.checks.exactness import FLOAT32_LIMIT

pytestmark = [pytest.mark.ranks, pytest.mark.waits, pytest.mark.xdist_group("restarts")]


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """The steps of a run that nothing happened to."""
    return train_through(None, tmp_path_factory.mktemp("smooth"), asynchronous=False)


def test_a_run_that_is_killed_and_started_again_ends_as_if_nothing_had_happened(
    smooth: list[Step], tmp_path: Path
) -> None:
    assert train_through(Kill(0, 5, "STEP"), tmp_path, asynchronous=True) == smooth
    assert sorted(n for step in smooth[:3] for n in step.sequences) == list(range(8))


def test_a_run_that_ran_out_of_memory_goes_on_within_less_as_if_nothing_had_happened(
    smooth: list[Step], tmp_path: Path
) -> None:
    short = train_through(Kill(1, 6, runs_out=True), tmp_path, asynchronous=False)
    assert [s.sequences for s in short] == [s.sequences for s in smooth]
    assert [s.loss for s in short] == pytest.approx([s.loss for s in smooth], abs=FLOAT32_LIMIT)
    configured = {step.limit_bytes for step in smooth}
    assert len(configured) == 1
    # saved every other step: the fifth is trained again, as far as batches fit within less
    assert {step.limit_bytes for step in short[:4]} == configured
    assert short[5].limit_bytes < min(configured)
