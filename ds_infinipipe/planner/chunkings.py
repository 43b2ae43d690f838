"""Algorithm 1 for every number of slices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from ds_infinipipe.planner.candidates import Chunking
from ds_infinipipe.planner.chunking import chunk_sequences
from ds_infinipipe.planner.costs import CostModel
from ds_infinipipe.planner.memory import MemoryModel
from ds_infinipipe.planner.settings import PlannerSettings

__all__ = ["iterate_chunkings"]


def iterate_chunkings(
    lengths: Sequence[int],
    cost: CostModel,
    memory: MemoryModel,
    limit_bytes: int,
    settings: PlannerSettings,
    ks: Iterable[int] | None = None,
) -> Iterator[Chunking]:
    """Algorithm 1 for K from 1 to the slice limit, or for `ks` of them.

    A K that cuts like an earlier one is left out.
    """
    token_limit = None if settings.token_limit == "auto" else settings.token_limit
    seen: set[object] = set()
    # a slice has at least one unit, so more slices than that cut nothing finer
    finest = -(-max(lengths) // math.lcm(memory.layout.sp, settings.alignment))
    most = min(settings.slice_limit(memory.layout.pp), finest)
    for k in range(1, most + 1) if ks is None else ks:
        chunks = chunk_sequences(
            lengths,
            k,
            cost,
            memory,
            limit_bytes,
            settings.alignment,
            memory.layout.sp,
            token_limit,
        )
        if chunks not in seen:
            seen.add(chunks)
            yield Chunking.of(k, chunks, cost, memory, limit_bytes, settings)
