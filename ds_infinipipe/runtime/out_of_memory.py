"""What counts as running out of memory, and what is said about it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ds_infinipipe.runtime.engine import InfiniPipeEngine

__all__ = ["OomReport", "format_size", "is_out_of_memory", "make_report"]

_GIB = 2**30

# cuBLAS and NCCL allocate for themselves and report it in words of their own
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "bad_alloc",
)


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


def make_report(engine: InfiniPipeEngine, error: BaseException) -> OomReport:
    """What this rank tells the others about its failure in the attempt under way."""
    step, plan = engine.step_state, engine.plan
    if step is not None:
        plan = step.plan
    place, lost = "outside a plan", ""
    if step is not None and step.instruction is not None:
        chunk = step.instruction.chunk
        what = f"chunk {chunk}" if chunk >= 0 else "the end of the step"
        place = f"at instruction {step.position} '{step.instruction}' ({what})"
        if step.is_committed:
            lost = "the ranks had agreed to change the weights"
    return OomReport(
        rank=engine.global_rank,
        replica=engine.grid.replica,
        stage=engine.stage_id,
        step=engine.global_steps + 1,
        place=place,
        predicted_bytes=0 if plan is None else plan.predicted.peak_bytes[engine.stage_id],
        limit_bytes=0 if plan is None else plan.memory_limit_bytes,
        measured=_measured(engine.device),
        cause=_first_line(error),
        lost=lost,
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
