"""All ranks end where one runs out of memory, with its cause; the next start plans within less.

The rank that fails announces why in the rendezvous store and ends what its peers wait for, so that
every rank raises the same error. A lower limit is stored beside the checkpoints, where a restart by
the launcher finds it: training goes on from the last checkpoint, exactly, under smaller plans.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as torch_dist

from ds_infinipipe.config.section import RecoverySettings
from ds_infinipipe.errors import (
    ConfigError,
    InfiniPipeError,
    OutOfMemoryError,
    PeerTimeoutError,
)
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.runtime.checkpoint.memory_limit import (
    MEMORY_LIMIT_FILE,
    MemoryLimit,
    read_memory_limit,
    write_memory_limit,
)
from ds_infinipipe.runtime.engine.planning import PlanService
from ds_infinipipe.runtime.engine.watchdog import Whereabouts
from ds_infinipipe.runtime.ranks.agree import raise_together
from ds_infinipipe.runtime.ranks.connections import abort_nccl, has_nccl, wake_others
from ds_infinipipe.runtime.ranks.faults import is_peer_failure, transport_reason
from ds_infinipipe.runtime.ranks.last_words import refer
from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.ranks.store import SideChannel

__all__ = ["MemoryGuard", "OomReport", "format_size", "is_out_of_memory"]

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


def is_out_of_memory(error: BaseException) -> bool:
    """True where an allocation failed, on a device or in host memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error).lower() for s in _SIGNS)


@dataclass(frozen=True)
class OomReport:
    """One rank's failure, with what its plan predicted for its stage."""

    rank: int
    stage: int
    step: int
    place: str
    predicted_bytes: int
    limit_bytes: int
    measured: str
    cause: str

    @classmethod
    def of(cls, error: BaseException, here: Whereabouts, plan: Plan) -> OomReport:
        """What this rank tells the others about its failure under `plan`."""
        rank, run = here.rank, here.run
        place = "outside a plan"
        if run is not None and run.instruction is not None:
            chunk = run.instruction.chunk
            what = f"chunk {chunk}" if chunk >= 0 else "the end of the step"
            place = f"at instruction {run.position} '{run.instruction}' ({what})"
        return cls(
            rank=rank.global_rank,
            stage=rank.stage,
            step=here.step,
            place=place,
            predicted_bytes=plan.predicted.peak_bytes[rank.stage],
            limit_bytes=plan.setup.limit_bytes,
            measured=_measured(rank.device),
            cause=_first_line(error),
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


class MemoryGuard:
    """Sees to it that no rank is left waiting for one that ran out of memory, and remembers it."""

    def __init__(
        self,
        rank: Rank,
        settings: RecoverySettings,
        *,
        timeout_s: float,
        plans: PlanService,
        whereabouts: Callable[[], Whereabouts],
        abandon: Callable[[], None],
    ) -> None:
        """`abandon` drops the tensors of the step under way."""
        self._rank = rank
        self._settings = settings
        self._plans = plans
        self._whereabouts = whereabouts
        self._abandon = abandon
        must_listen = rank.world_size > 1 and has_nccl()
        self._channel = SideChannel(timeout_s, abort_nccl if must_listen else None)
        self._folder: Path | None = None
        self._stored: MemoryLimit | None = None

    def adopt(self, folder: str | Path) -> None:
        """Plan within the limit stored in a folder of checkpoints, and store there from now on.

        A collective. Raises ConfigError on all ranks where the file is damaged, or where the step
        that it is for has run out of memory too often.
        """
        if not self._settings.enabled:
            return
        self._folder = Path(folder)
        with raise_together("reading the stored memory limit"):
            found = [read_memory_limit(self._folder) if self._rank.is_first else None]
            if found[0] is not None:
                self._check_lowerings(found[0])
        torch_dist.broadcast_object_list(found, src=0)
        self._stored = stored = found[0]
        configured = self._plans.limit_bytes
        if stored is None or stored.limit_bytes >= configured:
            return
        self._plans.tighten(stored.limit_bytes)
        if self._rank.is_first:
            logger.warning(
                "plans keep within %s as far as batches fit, not %s as configured, since %s; "
                "delete %s to plan within the configured limit again",
                format_size(stored.limit_bytes),
                format_size(configured),
                stored.cause,
                self._file,
            )

    def keep_in(self, folder: str | Path) -> None:
        """Store a lower limit in a folder of checkpoints from now on, without looking there."""
        if self._settings.enabled:
            self._folder = Path(folder)

    @contextmanager
    def watching(self, plan: Plan) -> Iterator[None]:
        """Where any rank runs out of memory in the body, all ranks raise OutOfMemoryError.

        A collective. A lost peer is a PeerTimeoutError that says where this rank was.
        """
        self._channel.begin()
        try:
            yield
        except Exception as error:
            here = self._whereabouts()
            mine = OomReport.of(error, here, plan) if is_out_of_memory(error) else None
            where = str(here)
            del here  # it holds the step
            self._abandon()
            if mine is not None:
                raise self._end(self._announce(mine)) from error
            if not isinstance(error, PeerTimeoutError) and not is_peer_failure(error):
                self._channel.fail(f"{where}: {type(error).__name__}: {error}")
                if not isinstance(error, InfiniPipeError):
                    logger.error("%s: %s", where, error)
                raise
            announced = self._channel.announced()
            if announced is not None:
                self._wake_others()
                raise self._end(OomReport.from_json(announced)) from error
            raise self._peer_error(error, where) from error

    def close(self) -> None:
        """End the thread that listens for other ranks."""
        self._channel.close()

    @property
    def _file(self) -> Path:
        assert self._folder is not None
        return self._folder / MEMORY_LIMIT_FILE

    def _check_lowerings(self, stored: MemoryLimit) -> None:
        most = self._settings.max_lowerings
        if stored.lowerings > most:
            raise ConfigError(
                f"{self._file}: up to step {stored.step} the run has run out of memory "
                f"{stored.lowerings} times in a row, and infinipipe.recovery.max_lowerings is "
                f"{most}. The last time {stored.cause}. Plan for more devices or another "
                "layout, set a smaller infinipipe.planner.memory_limit_gib, and delete the file"
            )

    def _announce(self, mine: OomReport) -> OomReport:
        """Tell the others, wake them, and store the limit if this rank was the first to fail."""
        first = OomReport.from_json(self._channel.announce(mine.to_json()))
        if first == mine and self._folder is not None:
            try:
                write_memory_limit(self._folder, self._lower_limit(mine))
            except OSError as error:
                logger.error("the lower memory limit cannot be stored in %s: %s", self._file, error)
        self._channel.wait_until_heard()
        self._wake_others()
        return first

    def _wake_others(self) -> None:
        if self._rank.world_size > 1:
            wake_others()

    def _lower_limit(self, report: OomReport) -> MemoryLimit:
        """As often in a row as no step behind those that failed before has been reached."""
        before = self._stored or MemoryLimit(report.limit_bytes, 0, 0, "")
        is_again = report.step <= before.step
        return MemoryLimit(
            limit_bytes=int(
                self._settings.reduction * min(report.predicted_bytes, report.limit_bytes)
            ),
            step=max(report.step, before.step),
            lowerings=1 + (before.lowerings if is_again else 0),
            cause=str(report),
        )

    def _end(self, report: OomReport) -> OutOfMemoryError:
        return refer(OutOfMemoryError(f"{report}. {self._repair(report)}"), report.rank)

    def _repair(self, report: OomReport) -> str:
        below = f"infinipipe.planner.memory_limit_gib below {report.predicted_bytes / 2**30:.4g}"
        if not self._settings.enabled:
            return f"Set {below}, or infinipipe.recovery.enabled to true, which does so by itself"
        if self._folder is None:
            return (
                f"Set {below}, or infinipipe.checkpoint.save_dir, the folder where the next start "
                "finds a lower limit and the last checkpoint"
            )
        limit = self._lower_limit(report)
        return (
            f"Started again, by the launcher or by hand, the run goes on from the last checkpoint "
            f"and plans within {format_size(limit.limit_bytes)}, which {self._file} says"
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
