"""Repeats a step that ran out of memory on some rank, under a plan that needs less.

The weights change at the end of a step only, after all ranks have agreed that its gradients are
complete. Up to there every rank can drop what it has and start again: connections are cut to wake
ranks that wait for the one that failed, all meet in the rendezvous store, the groups are connected
anew, and one plan is made under a limit below what was predicted where memory ran out.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed as torch_dist

from ds_infinipipe.errors import (
    ConfigError,
    InfeasiblePlanError,
    InfiniPipeError,
    OutOfMemoryError,
    PeerTimeoutError,
)
from ds_infinipipe.planner.types import Plan
from ds_infinipipe.runtime.faults import (
    is_peer_failure,
    naming_peer_failures,
    transport_reason,
)
from ds_infinipipe.runtime.last_words import refer
from ds_infinipipe.runtime.out_of_memory import (
    OomReport,
    format_size,
    is_out_of_memory,
    make_report,
)
from ds_infinipipe.runtime.regroup import GroupSet
from ds_infinipipe.runtime.side_channel import SideChannel
from ds_infinipipe.runtime.watchdog import Activity, whereabouts

if TYPE_CHECKING:
    from ds_infinipipe.runtime.engine import InfiniPipeEngine

__all__ = ["Recovery"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_RENEWABLE = {"gloo", "nccl"}


class Recovery:
    """Runs the attempts of a step; `repeats` is how often the last one was started again.

    With recovery off it only sees to it that all ranks end with the error that names the cause.
    """

    def __init__(self, engine: InfiniPipeEngine) -> None:
        self._engine = engine
        self._settings = engine.settings.recovery
        self._is_alone = torch_dist.get_world_size() == 1
        # only used between steps, when nothing can be stuck in them
        self._groups = GroupSet(kept=(engine.grid.plan_pg, engine.grid.control_pg))
        self._is_enabled = self._settings.is_enabled(engine.device.type)
        backends = self._groups.backends
        if self._is_enabled and not backends <= _RENEWABLE:
            raise ConfigError(
                f"process groups use {', '.join(sorted(backends))}, but only gloo and nccl can be "
                "connected again after a rank ran out of memory: set infinipipe.recovery.enabled "
                "to false"
            )
        has_nccl = "nccl" in backends and not self._is_alone
        self._channel = SideChannel(
            engine.settings.runtime.timeout_s, self._groups.abort if has_nccl else None
        )
        if not self._is_alone:
            self._groups.adopt(self._channel.store)
        self.repeats = 0
        self.activity: Activity | None = None

    def run(self, plan: Plan, lengths: Sequence[int], attempt: Callable[[Plan], Result]) -> Result:
        """`attempt(plan)`, again with smaller plans while any rank runs out of memory in it.

        A collective. Raises OutOfMemoryError or InfeasiblePlanError on all ranks where that is not
        possible or not wanted, PeerTimeoutError for a lost peer, and what else `attempt` raises.
        """
        self.repeats = 0
        self._channel.begin()
        while True:
            try:
                return attempt(plan)
            except Exception as error:
                reports = self._agree(error)
                if reports is None:
                    raise
                _forget(error)
            plan = self._plan_again(plan, lengths, reports)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A peer's failure in the body becomes OutOfMemoryError where that is what happened."""
        try:
            yield
        except PeerTimeoutError as error:
            announced = self._channel.announced()
            report = None if announced is None else OomReport.from_json(announced)
            if report is None or (self._is_enabled and not report.lost):
                raise
            raise self._end(report) from error

    def close(self) -> None:
        """End the thread that listens for other ranks."""
        self._channel.close()

    def _agree(self, error: Exception) -> list[OomReport] | None:
        """All ranks' reports; None for an error of this rank alone that is to be raised as it is.

        Drops the step's tensors in any case.
        """
        engine = self._engine
        mine = make_report(engine, error) if is_out_of_memory(error) else None
        where = whereabouts(engine)
        engine.abandon_step()
        if mine is not None:
            self._channel.announce(mine.to_json())
        elif not isinstance(error, PeerTimeoutError) and not is_peer_failure(error):
            self._channel.fail(f"{where}: {type(error).__name__}: {error}")
            if not isinstance(error, InfiniPipeError):
                logger.error("%s: %s", where, error)
            return None
        announced = self._channel.announced()
        first = mine if announced is None else OomReport.from_json(announced)
        if first is None:
            raise self._peer_error(error, where) from error
        return self._meet(mine, first, error)

    def _meet(self, mine: OomReport | None, first: OomReport, error: Exception) -> list[OomReport]:
        if not self._is_alone:
            self._groups.abort(self._channel.round)
        if not self._is_enabled or first.lost:
            self._channel.linger()
            raise self._end(first) from error
        self.activity = Activity("waiting for all ranks to repeat a step", time.monotonic())
        texts = self._channel.meet("" if mine is None else mine.to_json())
        reports = [OomReport.from_json(text) for text in texts if text]
        lost = [report for report in reports if report.lost]
        if lost or self.repeats == self._settings.max_repeats:
            raise self._end((lost or reports)[0]) from error
        return reports

    def _end(self, report: OomReport) -> OutOfMemoryError:
        return refer(OutOfMemoryError(f"{report}{self._ending(report)}"), report.rank)

    def _ending(self, report: OomReport) -> str:
        lower = (
            f"set infinipipe.planner.memory_limit_gib below {report.predicted_bytes / 2**30:.4g}"
        )
        if report.lost:
            return f". The step cannot be repeated, as {report.lost}: {lower}"
        if self._is_enabled:
            return (
                f". It was repeated {self.repeats} times, as often as "
                f"infinipipe.recovery.max_repeats allows: {lower}"
            )
        return (
            f": {lower}, or set infinipipe.recovery.enabled to true, which plans such a step anew"
        )

    def _peer_error(self, error: Exception, where: str) -> PeerTimeoutError:
        if isinstance(error, PeerTimeoutError):
            reason = str(error)
        else:
            peers = [r for r in self._engine.grid.sequence_ranks if r != self._engine.global_rank]
            reason = f"in a collective with ranks {peers}: {transport_reason(error)}"
        failed = self._channel.failed()
        cause = "look at the first rank that failed"
        if failed is not None:
            cause = f"the first to fail was {failed}"
        return PeerTimeoutError(f"{reason}. This is {where}; {cause}")

    def _plan_again(self, plan: Plan, lengths: Sequence[int], reports: Sequence[OomReport]) -> Plan:
        engine, first = self._engine, reports[0]
        self.repeats += 1
        self.activity = Activity("planning a step anew", time.monotonic())
        self._reconnect()
        engine.sharding.abandon()
        gc.collect()
        get_accelerator().empty_cache()
        peak = min(min(r.predicted_bytes, r.limit_bytes) for r in reports)
        limit = int(self._settings.reduction * peak)
        try:
            failed_here = any(r.replica == engine.grid.replica for r in reports)
            smaller = engine.plan_within(limit, lengths, limit if failed_here else None)
        except InfeasiblePlanError as error:
            message = f"{first}. Planned anew within {format_size(limit)}: {error}"
            raise refer(InfeasiblePlanError(message), first.rank) from error
        if engine.global_rank == 0:
            logger.warning(
                "%s. %d of %d ranks did; the step is repeated, planned within %s, and later steps "
                "are too as far as they fit",
                first,
                len(reports),
                torch_dist.get_world_size(),
                format_size(limit),
            )
        self.activity = None
        return smaller

    def _reconnect(self) -> None:
        if not self._is_alone:
            with naming_peer_failures("connecting the ranks anew after one ran out of memory"):
                self._groups.renew(self._channel.store)
        self._channel.next_round()
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)


def _forget(error: BaseException) -> None:
    """Let go of the tensors in the frames that an error and its causes went through."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            pending += [found.__cause__, found.__context__]
