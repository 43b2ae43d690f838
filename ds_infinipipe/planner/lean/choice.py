"""What lean mode decides on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.lean.candidates import LeanCandidate
from ds_infinipipe.planner.memory_arrays import MemoryArrays

__all__ = ["LeanChoice"]

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LeanChoice:
    """A candidate with counts [pp, chunks] that fits, its time, and its memory."""

    candidate: LeanCandidate
    counts: IntArray
    takes_s: float
    arrays: MemoryArrays
    status: str = "feasible"
    note: str = ""
