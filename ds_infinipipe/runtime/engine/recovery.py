"""Repeats a step that ran out of memory on some rank, under a plan that needs less.

The weights change at the end of a step only, after all ranks have agreed that its gradients are
complete. Up to there every rank can drop what it has and start again: connections are cut to wake
ranks that wait for the one that failed, all meet in the rendezvous store, the groups are connected
anew, and one plan is made under a limit below what was predicted where memory ran out.
"""

from __future__ import annotations

import gc
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

from ds_infinipipe.config.section import RecoverySettings
from ds_infinipipe.errors import (
    ConfigError,
    InfeasiblePlanError,
    InfiniPipeError,
    OutOfMemoryError,
    PeerTimeoutError,
)
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.runtime.engine.planning import PlanService
from ds_infinipipe.runtime.engine.watchdog import Activity, Whereabouts
from ds_infinipipe.runtime.ranks.faults import (
    is_peer_failure,
    naming_peer_failures,
    transport_reason,
)
from ds_infinipipe.runtime.ranks.last_words import refer
from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.ranks.regroup import GroupSet
from ds_infinipipe.runtime.ranks.store import SideChannel
from ds_infinipipe.runtime.shards.sharding import Sharding

__all__ = ["OomReport", "Recovery", "format_size", "is_out_of_memory"]

_GIB = 2**30
# cuBLAS and NCCL allocate for themselves and report it in words of their own
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "bad_alloc",
)
logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_RENEWABLE = {"gloo", "nccl"}


def is_out_of_memory(error: BaseException) -> bool:
    """True where an allocation failed, on a device or in host memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error).lower() for s in _SIGNS)


@dataclass(frozen=True)
class OomReport:
    """One rank's failure in one attempt, with what its plan predicted for its stage.

    `lost` says why the step cannot be repeated, and is empty where it can.
    """

    rank: int
    replica: int
    stage: int
    step: int
    place: str
    predicted_bytes: int
    limit_bytes: int
    measured: str
    cause: str
    lost: str = ""

    @classmethod
    def of(cls, error: BaseException, here: Whereabouts, plan: Plan) -> OomReport:
        """What this rank tells the others about its failure in an attempt at `plan`."""
        rank, run = here.rank, here.run
        place, lost = "outside a plan", ""
        if run is not None and run.instruction is not None:
            chunk = run.instruction.chunk
            what = f"chunk {chunk}" if chunk >= 0 else "the end of the step"
            place = f"at instruction {run.position} '{run.instruction}' ({what})"
            if run.is_committed:
                lost = "the ranks had agreed to change the weights"
        return cls(
            rank=rank.global_rank,
            replica=rank.replica,
            stage=rank.stage,
            step=here.step,
            place=place,
            predicted_bytes=plan.predicted.peak_bytes[rank.stage],
            limit_bytes=plan.setup.limit_bytes,
            measured=_measured(rank.device),
            cause=_first_line(error),
            lost=lost,
        )

    def to_json(self) -> str:
        """One line for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> OomReport:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return (
            f"step {self.step}: rank {self.rank} (stage {self.stage}) ran out of memory "
            f"{self.place}, where the plan predicts a peak of {format_size(self.predicted_bytes)} "
            f"within {format_size(self.limit_bytes)}{self.measured} ({self.cause})"
        )


def format_size(num_bytes: int) -> str:
    """In MiB below a hundredth of a GiB."""
    if num_bytes >= _GIB // 100:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.3f} MiB"


def _measured(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"; {format_size(torch.cuda.memory_allocated(device))} were allocated, "
        f"{format_size(torch.cuda.memory_reserved(device))} reserved, {format_size(free)} of the "
        f"device's {format_size(total)} free"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


class Recovery:
    """Runs the attempts of a step; `repeats` is how often the last one was started again.

    With recovery off it only sees to it that all ranks end with the error that names the cause.
    """

    def __init__(
        self,
        rank: Rank,
        settings: RecoverySettings,
        *,
        timeout_s: float,
        kept: tuple[Any, ...],
        plans: PlanService,
        sharding: Sharding,
        whereabouts: Callable[[], Whereabouts],
        abandon: Callable[[], None],
    ) -> None:
        """`kept` are groups that are used between steps only, when nothing can be stuck in them;
        `abandon` drops the tensors of the step under way.
        """
        self._rank = rank
        self._settings = settings
        self._plans = plans
        self._sharding = sharding
        self._whereabouts = whereabouts
        self._abandon = abandon
        self._is_alone = rank.world_size == 1
        self._groups = GroupSet(kept=kept)
        self._is_enabled = settings.is_enabled(rank.device.type)
        backends = self._groups.backends
        if self._is_enabled and not backends <= _RENEWABLE:
            raise ConfigError(
                f"process groups use {', '.join(sorted(backends))}, but only gloo and nccl can be "
                "connected again after a rank ran out of memory: set infinipipe.recovery.enabled "
                "to false"
            )
        has_nccl = "nccl" in backends and not self._is_alone
        self._channel = SideChannel(timeout_s, self._groups.abort if has_nccl else None)
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
                reports = self._agree(error, plan)
                if reports is None:
                    raise
                _forget(error)
            plan = self._plan_again(lengths, reports)

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

    def _agree(self, error: Exception, plan: Plan) -> list[OomReport] | None:
        """All ranks' reports; None for an error of this rank alone that is to be raised as it is.

        Drops the step's tensors in any case.
        """
        here = self._whereabouts()
        mine = OomReport.of(error, here, plan) if is_out_of_memory(error) else None
        where = str(here)
        del here  # it holds the step
        self._abandon()
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
            peers = [r for r in self._rank.stage_ranks if r != self._rank.global_rank]
            reason = f"in a collective with ranks {peers}: {transport_reason(error)}"
        failed = self._channel.failed()
        cause = "look at the first rank that failed"
        if failed is not None:
            cause = f"the first to fail was {failed}"
        return PeerTimeoutError(f"{reason}. This is {where}; {cause}")

    def _plan_again(self, lengths: Sequence[int], reports: Sequence[OomReport]) -> Plan:
        first = reports[0]
        self.repeats += 1
        self.activity = Activity("planning a step anew", time.monotonic())
        self._reconnect()
        self._sharding.abandon()
        gc.collect()
        get_accelerator().empty_cache()
        peak = min(min(r.predicted_bytes, r.limit_bytes) for r in reports)
        limit = int(self._settings.reduction * peak)
        try:
            smaller = self._plan_within(limit, lengths, reports)
        except InfeasiblePlanError as error:
            message = f"{first}. Planned anew within {format_size(limit)}: {error}"
            raise refer(InfeasiblePlanError(message), first.rank) from error
        if self._rank.is_first:
            logger.warning(
                "%s. %d of %d ranks did; the step is repeated, planned within %s, and later steps "
                "are too as far as they fit",
                first,
                len(reports),
                self._rank.world_size,
                format_size(limit),
            )
        self.activity = None
        return smaller

    def _plan_within(
        self, limit_bytes: int, lengths: Sequence[int], reports: Sequence[OomReport]
    ) -> Plan:
        """Plan within a smaller limit from now on, this batch at once; a collective.

        What does not fit in it may take the configured limit in replicas where nothing failed.
        """
        self._plans.tighten(limit_bytes)
        failed_here = any(report.replica == self._rank.replica for report in reports)
        most = limit_bytes if failed_here else None
        return self._plans.plan_for(lengths, aside=True, at_most_bytes=most)[0]

    def _reconnect(self) -> None:
        if not self._is_alone:
            with naming_peer_failures("connecting the ranks anew after one ran out of memory"):
                self._groups.renew(self._channel.store)
        self._channel.next_round()
        if self._rank.device.type == "cuda":
            torch.cuda.synchronize(self._rank.device)


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
