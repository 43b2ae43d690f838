"""Plan the next step in a worker process while the current one trains; all ranks get one plan.

The first rank of each replica owns the worker, which is torch-free and started by name rather than
forked or spawned, so the user's script is never imported a second time. A solve under a time limit
is not reproducible across machines, so it is done once and its bytes are broadcast.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as torch_dist

from ds_infinipipe import errors
from ds_infinipipe.errors import InfeasiblePlanError, InfiniPipeError, PlanMismatchError
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.time import CostModel
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.search.replicas import idle_plan, split_batch
from ds_infinipipe.runtime.ranks.agree import raise_together
from ds_infinipipe.runtime.ranks.faults import naming_peer_failures
from ds_infinipipe.runtime.ranks.last_words import refer

__all__ = ["PlanService", "PlanWorker", "PlanningReport", "PlanningTask"]

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "ds_infinipipe.planner.search.worker")


@dataclass(frozen=True)
class PlanningTask:
    """What does not change from step to step."""

    setup: Setup
    settings: PlannerSettings
    deadline_s: float | None = None
    """Bound on solving in this process, where no worker can be given up."""

    @property
    def limit_bytes(self) -> int:
        """Memory that plans may use."""
        return self.setup.limit_bytes

    def within(self, limit_bytes: int) -> PlanningTask:
        """The same task under another limit."""
        return replace(self, setup=replace(self.setup, limit_bytes=limit_bytes))

    def request(self, number: int, lengths: Sequence[int]) -> str:
        """One line for the worker."""
        body = {
            "id": number,
            "lengths": list(lengths),
            "setup": self.setup.to_json(),
            "settings": self.settings.model_dump(),
        }
        return json.dumps(body)

    def solve(self, lengths: Sequence[int], *, greedy: bool = False) -> Plan:
        """Plan in this process, within the deadline; `greedy` takes the fastest planner."""
        settings = self.settings
        if settings.deadline_s is None:
            settings = settings.model_copy(update={"deadline_s": self.deadline_s})
        if greedy:
            settings = settings.model_copy(update={"mode": "paper", "solver": "greedy"})
        return plan_batch(lengths, self.setup, settings)

    def idle(self) -> Plan:
        """The plan of a replica that got no sequence."""
        return idle_plan(self.setup, self.settings)

    def share(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Sequence numbers of every replica of the layout."""
        return split_batch(lengths, self.setup.layout.dp, CostModel(self.setup))


@dataclass(frozen=True)
class PlanningReport:
    """How a step's plan came about. `waited_s` is what training stood still for it; `was_ahead`
    says that it was solved beside the step before."""

    solve_s: float
    waited_s: float
    is_fallback: bool = False
    was_ahead: bool = False


class PlanWorker:
    """The worker process: one request in flight, answers read by a thread."""

    def __init__(self, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._number = 0

    def submit(self, task: PlanningTask, lengths: Sequence[int]) -> None:
        """Send a request, starting the process if there is none. Raises OSError if it is gone."""
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._number += 1
        self._process.stdin.write(task.request(self._number, lengths) + "\n")
        self._process.stdin.flush()

    def result(self, timeout_s: float) -> dict[str, Any]:
        """The answer to the last request; TimeoutError if late, OSError if the worker died."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no plan within {timeout_s:g} s") from None
            if answer is None:
                raise OSError("the planning worker ended")
            if answer.get("id") == self._number:
                return answer

    def stop(self) -> None:
        """End the process now; the next `submit` starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close_quietly(pipe)

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        thread = threading.Thread(
            target=_read_answers, args=(self._process.stdout, self._answers), daemon=True
        )
        thread.start()


def _read_answers(pipe: Any, answers: queue.Queue[dict[str, Any] | None]) -> None:
    try:
        for line in pipe:
            answers.put(json.loads(line))
    except ValueError as error:  # damaged line, or the pipe was closed under us
        logger.warning("the planning worker's answer cannot be read: %s", error)
    answers.put(None)


def _close_quietly(pipe: Any) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        logger.debug("the planning worker was gone before its pipe was closed")


class PlanService:
    """Hands every rank of a replica the plan of its batch.

    `pg` is the replica's gloo group and `solver` its global rank that solves, ahead of time when it
    can. With several replicas `control_pg` joins them, so that an error of one stops all.
    """

    def __init__(
        self,
        task: PlanningTask,
        *,
        pg: Any,
        solver: int = 0,
        control_pg: Any = None,
        asynchronous: bool = True,
        deadline_s: float = 30.0,
        worker: PlanWorker | None = None,
    ) -> None:
        self._task = self._configured = task
        self._pg = pg
        self._solver = solver
        self._control_pg = control_pg
        self._deadline_s = deadline_s
        self._is_solver = torch_dist.get_rank() == solver
        self._worker = (worker or PlanWorker()) if self._is_solver and asynchronous else None
        self._pending: tuple[int, ...] | None = None

    def submit(self, lengths: Sequence[int]) -> None:
        """Start to solve the next batch; does nothing on ranks that do not solve."""
        if self._worker is None or not lengths:
            return
        try:
            self._worker.submit(self._task, lengths)
            self._pending = tuple(lengths)
        except OSError as error:
            logger.warning("the planning worker cannot be used (%s); planning in place", error)
            self._worker.stop()

    def plan_for(
        self, lengths: Sequence[int], *, aside: bool = False
    ) -> tuple[Plan, PlanningReport]:
        """The plan of this replica's batch, a collective over all ranks.

        `aside` leaves the plan that is being solved ahead alone, for an evaluation in between. What
        does not fit in the limit set by `tighten` is planned within the configured one.

        Raises what the planner raised, on every rank of every replica, and PlanMismatchError where
        a rank's batch is not the one that was planned.
        """
        with naming_peer_failures("exchanging a plan"):
            if self._control_pg is None:
                return self._plan_replica(tuple(lengths), aside)
            with raise_together("planning", self._control_pg):
                return self._plan_replica(tuple(lengths), aside)

    def _plan_replica(self, lengths: tuple[int, ...], aside: bool) -> tuple[Plan, PlanningReport]:
        if not lengths:
            # it has nothing that a smaller limit could save
            return self._configured.idle(), PlanningReport(0.0, 0.0)
        payload = self._solve(lengths, aside) if self._is_solver else None
        answer = _broadcast_json(payload, self._solver, self._pg)
        if not answer["ok"]:
            kind = getattr(errors, answer["error_type"], InfiniPipeError)
            raise refer(kind(answer["message"]), self._solver)
        plan = Plan.from_json(answer["plan"])
        self._compare(plan, lengths)
        report = PlanningReport(
            plan.solver.time_s, answer["waited_s"], answer["is_fallback"], answer["was_ahead"]
        )
        return plan, report

    @property
    def limit_bytes(self) -> int:
        """The configured memory limit."""
        return self._configured.limit_bytes

    def tighten(self, limit_bytes: int) -> None:
        """Plan within a smaller limit than the configured one from now on."""
        self._task = self._configured.within(limit_bytes)

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.stop()

    def _solve(self, lengths: tuple[int, ...], aside: bool) -> dict[str, Any]:
        started = time.perf_counter()
        pending = None
        if not aside:
            pending, self._pending = self._pending, None
        answer: dict[str, Any] | None = None
        is_fallback = was_ahead = False
        if pending == lengths and self._worker is not None:
            answer = self._await_worker()
            was_ahead = answer is not None
            is_fallback = answer is None
        if answer is None:
            answer = _solve_here(self._task, lengths, greedy=is_fallback)
        is_infeasible = answer.get("error_type") == InfeasiblePlanError.__name__
        if is_infeasible and self._task is not self._configured:
            answer = _solve_here(self._configured, lengths, greedy=is_fallback)
        waited_s = time.perf_counter() - started
        return {
            **answer,
            "waited_s": waited_s,
            "is_fallback": is_fallback,
            "was_ahead": was_ahead,
        }

    def _await_worker(self) -> dict[str, Any] | None:
        assert self._worker is not None
        try:
            answer = self._worker.result(self._deadline_s)
        except (TimeoutError, OSError) as error:
            logger.warning("%s; the greedy solver takes over in place", error)
            self._worker.stop()
            return None
        if not answer["ok"] and answer["error_type"] not in errors.__all__:
            logger.warning(
                "the planning worker failed with %s: %s; the greedy solver takes over in place",
                answer["error_type"],
                answer["message"],
            )
            return None
        return answer

    def _compare(self, plan: Plan, lengths: tuple[int, ...]) -> None:
        differs = torch.tensor([int(plan.lengths != lengths)])
        torch_dist.all_reduce(differs, group=self._pg)
        if differs.item():
            error = PlanMismatchError(
                f"{differs.item()} of {torch_dist.get_world_size(self._pg)} ranks hold a batch "
                f"other than the planned one ({len(plan.lengths)} sequences, {plan.num_tokens} "
                "tokens): every rank must read the same sequences in the same order; check seeds "
                "and samplers"
            )
            raise refer(error, self._solver)


def _solve_here(task: PlanningTask, lengths: tuple[int, ...], *, greedy: bool) -> dict[str, Any]:
    try:
        plan = task.solve(lengths, greedy=greedy)
    except InfiniPipeError as error:
        return {"ok": False, "error_type": type(error).__name__, "message": str(error)}
    return {"ok": True, "plan": plan.to_json()}


def _broadcast_json(payload: dict[str, Any] | None, source: int, pg: Any) -> dict[str, Any]:
    data = b"" if payload is None else json.dumps(payload).encode()
    size = torch.tensor([len(data)])
    torch_dist.broadcast(size, src=source, group=pg)
    if payload is None:
        buffer = torch.empty(int(size.item()), dtype=torch.uint8)
    else:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch_dist.broadcast(buffer, src=source, group=pg)
    content: dict[str, Any] = json.loads(buffer.numpy().tobytes())
    return content
