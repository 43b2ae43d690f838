"""Settings of the whole test run; its place puts `tests/` on the path, for `import ranks`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import effort  # noqa: F401  loads hypothesis' profile, also for tests that name no number


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that processes that share them out all end at about the same time.

    Those that wait are spread among those that compute, which have the cores meanwhile.
    """
    waits, others = _part(items, lambda item: _has(item, "waits"))
    ranks, others = _part(others, lambda item: _has(item, "ranks"))
    slow, others = _part(others, lambda item: _has(item, "slow"))
    items[:] = [*_spread(waits, ranks), *slow, *others]


@pytest.fixture(scope="session", autouse=True)
def _no_rank_is_left_behind() -> Iterator[None]:
    yield
    if "ranks" in sys.modules:
        assert sys.modules["ranks"].left_behind() == {}


def _has(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def _part(
    items: Sequence[pytest.Item], belongs: Callable[[pytest.Item], bool]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    return [i for i in items if belongs(i)], [i for i in items if not belongs(i)]


def _spread(*groups: Sequence[pytest.Item]) -> list[pytest.Item]:
    """All items, each group in its order and evenly over the whole."""
    placed = [
        ((index + 0.5) / len(group), item) for group in groups for index, item in enumerate(group)
    ]
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]
