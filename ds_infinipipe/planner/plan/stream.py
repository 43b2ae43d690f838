"""Instructions of a stage, and when they ran or are expected to run. Frozen, pure data.

Indices are 0-based, times are float seconds. For compiled loops a compute operation is a whole
number: k is F of chunk k, -(k + 1) its B, SPLIT + k its W and -SPLIT - (k + 1) its I. Where stages
have unequally many operations, the shorter lists end in NOTHING.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ds_infinipipe.errors import ScheduleError

__all__ = ["NOTHING", "SPLIT", "Instruction", "Op", "Span", "Timeline"]

SPLIT = 2**40
NOTHING = 2**41


class Op(str, Enum):
    """What a stage can be told to do; the value is the text form.

    B is a whole backward. I is its first half, the gradient of the chunk's input, which another
    stage may wait for; W is the rest, the gradients of the weights, which only STEP waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECV_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECV_GRADIENT = "RECV_B"
    STEP = "STEP"

    @property
    def is_compute(self) -> bool:
        return self in _COMPUTE

    @property
    def has_chunk(self) -> bool:
        return self not in _WITHOUT_CHUNK

    @property
    def makes_gradient(self) -> bool:
        """True for B and I, which take and make the gradients that stages exchange."""
        return self is Op.BACKWARD or self is Op.BACKWARD_INPUT

    @property
    def may_recompute(self) -> bool:
        """True for F, B and I, which state how many layers are recomputed."""
        return self is Op.FORWARD or self.makes_gradient


_COMPUTE = frozenset((Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
_WITHOUT_CHUNK = frozenset((Op.STEP,))
_INSTRUCTION_TEXT = re.compile(
    rf"({'|'.join(op.value for op in Op if op.has_chunk)})(\d+)(?:r(\d+))?"
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a stage's stream; `recompute` counts layers and belongs to F, B and I."""

    op: Op
    chunk: int = -1
    recompute: int = 0

    def __str__(self) -> str:
        if not self.op.has_chunk:
            return str(self.op.value)
        suffix = f"r{self.recompute}" if self.recompute else ""
        return f"{self.op.value}{self.chunk}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Inverse of `str`; raises ScheduleError on anything else."""
        if text in {op.value for op in _WITHOUT_CHUNK}:
            return cls(Op(text))
        match = _INSTRUCTION_TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"'{text}' is not an instruction: expected forms are F3, F3r2, B3, I3, W3, "
                "SEND_F3, RECV_F3, SEND_B3, RECV_B3 and STEP"
            )
        op = Op(match.group(1))
        recompute = int(match.group(3) or 0)
        if recompute and not op.may_recompute:
            raise ScheduleError(f"'{text}': only F, B and I carry a number of recomputed layers")
        return cls(op, int(match.group(2)), recompute)


@dataclass(frozen=True, slots=True)
class Span:
    """One F, B, I or W on one stage, simulated or measured."""

    stage: int
    op: Op
    chunk: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of one step; `bubble_ratio` is idle time over makespan, averaged over stages."""

    spans: tuple[Span, ...]
    makespan_s: float
    bubble_ratio: float
    busy_s: tuple[float, ...]
