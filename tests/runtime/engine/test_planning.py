"""Planning beside training: one plan for all ranks, and what happens when it is late or fails."""

from __future__ import annotations

import logging
import sys
import time

import pytest
import torch.distributed as dist
from ranks import run_strict

from ds_infinipipe.errors import InfeasiblePlanError, PlanMismatchError
from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSection
from ds_infinipipe.planner.facts.setup import Execution, make_layout
from ds_infinipipe.runtime.engine.planning import PlanningTask, PlanService, PlanWorker

pytestmark = pytest.mark.ranks

_MODEL = ModelSpec("tiny", 4, 32, 48, 4, 2, 8, 97)
_LENGTHS = (70, 33, 12, 9, 5)


def _task(**settings: object) -> PlanningTask:
    section = PlannerSection.model_validate(settings)
    return PlanningTask(
        section.setup(
            _MODEL,
            BUILTIN_CLUSTERS["cpu-local"],
            make_layout(_MODEL, 2, 1),
            Execution(dtype_bytes=4, fused_kernels=False),
        ),
        section.settings,
    )


def _service(command: tuple[str, ...] | None = None, deadline_s: float = 30.0) -> PlanService:
    worker = PlanWorker() if command is None else PlanWorker(command)
    return PlanService(_task(), pg=dist.group.WORLD, deadline_s=deadline_s, worker=worker)


def _plan_twice(rank: int) -> tuple[list[str], list[bool]]:
    service = _service()
    first, _ = service.plan_for(_LENGTHS)
    service.submit(_LENGTHS[1:])
    if rank == 0:  # as long as a training step would take
        assert service._worker is not None
        while service._worker._answers.empty():
            time.sleep(0.05)
    second, report = service.plan_for(_LENGTHS[1:])
    service.close()
    return [first.digest(), second.digest()], [report.waited_s < 2.0, report.is_fallback]


def test_all_ranks_get_the_plan_the_worker_solved_ahead() -> None:
    (digests, (is_hidden, is_fallback)), (others, _) = run_strict(_plan_twice, 2, timeout=60.0)
    assert digests == others
    assert digests[0] == _task().solve(_LENGTHS).digest()
    assert digests[1] == _task().solve(_LENGTHS[1:]).digest()
    assert is_hidden and not is_fallback


def _plan_with(rank: int, script: str, deadline_s: float) -> tuple[str, bool, float, bool]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_infinipipe.runtime.engine.planning").addHandler(handler)
    service = _service((sys.executable, "-c", script), deadline_s)
    service.submit(_LENGTHS)
    plan, report = service.plan_for(_LENGTHS)
    service.close()
    is_logged = any("greedy solver takes over" in m for m in messages)
    return plan.digest(), report.is_fallback, report.waited_s, is_logged or rank != 0


@pytest.mark.parametrize(
    "script",
    [
        "import time; time.sleep(60)",
        "raise SystemExit(3)",
        "print('no json')",
        "import sys; sys.stdin.readline(); print("
        '\'{"id": 1, "ok": false, "error_type": "MemoryError", "message": "full"}\', flush=True);'
        "sys.stdin.readline()",
    ],
    ids=["late", "dead", "babbling", "failing"],
)
def test_a_late_or_failed_worker_is_replaced_by_the_greedy_solver(script: str) -> None:
    results = run_strict(_plan_with, 2, script, 1.0, timeout=60.0)
    expected = _task(mode="paper", solver="greedy").solve(_LENGTHS).digest()
    for digest, is_fallback, waited_s, is_logged in results:
        assert digest == expected
        assert is_fallback and is_logged
        assert waited_s < 30.0


def _infeasible(rank: int) -> str:
    service = PlanService(_task(memory_limit_gib=1e-6), pg=dist.group.WORLD, asynchronous=False)
    try:
        service.plan_for(_LENGTHS)
    except InfeasiblePlanError as error:
        return str(error)
    return ""


def test_every_rank_raises_the_planners_error() -> None:
    first, second = run_strict(_infeasible, 2, timeout=60.0)
    assert first == second != ""


def _different_batches(rank: int) -> str:
    service = PlanService(_task(), pg=dist.group.WORLD, asynchronous=False)
    try:
        service.plan_for(_LENGTHS if rank == 0 else (*_LENGTHS[:-1], 6))
    except PlanMismatchError as error:
        return str(error)
    return ""


def test_ranks_with_different_batches_all_refuse() -> None:
    for message in run_strict(_different_batches, 2, timeout=60.0):
        assert "1 of 2 ranks hold a batch other than the planned one" in message
