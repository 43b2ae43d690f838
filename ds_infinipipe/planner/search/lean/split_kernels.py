"""Compiled inner loops that split backwards: a walk that fills waits, and what to join again.

Operations are numbers as in plan/stream.py. p counts stages, n chunks, m operations of a stage,
bytes are int64, times float64 seconds. Both are counted by the steps of predict/kernels.py.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.plan.stream import NOTHING, SPLIT
from ds_infinipipe.planner.predict.kernels import (
    BYTES,
    FLOATS,
    INTS,
    TIMES,
    Bytes,
    Times,
    added_bytes,
    chunk_of,
    compiled,
    ends_s,
    removed_bytes,
    transient_bytes,
)

__all__ = ["fill_waits", "join_backwards"]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]


@compiled((INTS[2], TIMES, BYTES, INTS[2], INTS[2], INTS[0], INTS[0], FLOATS[0]))
def fill_waits(
    operations: IntArray,
    times: Times,
    amounts: Bytes,
    transfers: IntArray,
    counts: IntArray,
    limit: int,
    most: int,
    share: float,
) -> IntArray:
    """Operations [p, 3n] of F, I and W, or B where an I does not fit, in the order of the given.

    A stage runs a W where it would wait and at least `share` of it is over by then, where more than
    `most` of them are left, and where the next operation would not fit the limit otherwise. Stages
    take turns; what one does depends on what is sent to it, not on who goes first.
    """
    stages, length = operations.shape
    p2p_s = times.p2p_s
    result = np.full((stages, 3 * length // 2), NOTHING, dtype=np.int64)
    used = np.zeros(stages, dtype=np.int64)
    left = np.zeros((stages, length // 2), dtype=np.int64)  # chunks whose W is to come
    first = np.zeros(stages, dtype=np.int64)
    end = np.zeros(stages, dtype=np.int64)
    clock_s = np.zeros(stages)
    done = np.zeros(stages, dtype=np.int64)
    alive = amounts.static.copy()
    activation_s = np.full((stages, p2p_s.size), -1.0)  # arrivals; negative: not sent yet
    gradient_s = np.full((stages, p2p_s.size), -1.0)
    activation_s[0, :] = 0.0
    has_moved = True
    while has_moved:
        has_moved = False
        for stage in range(stages):
            while done[stage] < length:
                at, clock, current = done[stage], clock_s[stage], alive[stage]
                code = operations[stage, at]
                chunk, moving = chunk_of(code), transfers[stage, at]
                count = counts[stage, chunk]
                arrival = activation_s[stage, chunk] if code >= 0 else gradient_s[stage, chunk]
                if arrival < 0.0:
                    break
                added = added_bytes(amounts, stage, code, count)
                need = added + moving + transient_bytes(amounts, stage, code, count)
                start = max(arrival, clock)
                while first[stage] < end[stage]:
                    late = left[stage, first[stage]]
                    wait = start - clock
                    fills = wait > 0.0 and share * times.weight_s[stage, late] <= wait
                    is_full = end[stage] - first[stage] > most
                    if not (fills or is_full or current + need > limit):
                        break
                    result[stage, used[stage]] = SPLIT + late
                    used[stage] += 1
                    first[stage] += 1
                    clock = ends_s(times, stage, SPLIT + late, clock)
                    current -= removed_bytes(amounts, stage, SPLIT + late, 0)
                current += added
                if code < 0:
                    half, later = code - SPLIT, SPLIT + chunk
                    during = current + transient_bytes(amounts, stage, half, count)
                    after = current - removed_bytes(amounts, stage, half, count)
                    after += transient_bytes(amounts, stage, later, 0)
                    if max(during, after) + moving <= limit:
                        code = half
                        left[stage, end[stage]] = chunk
                        end[stage] += 1
                clock = ends_s(times, stage, code, max(start, clock))
                if code < 0 and stage > 0:
                    gradient_s[stage - 1, chunk] = clock + p2p_s[chunk]
                elif code >= 0 and stage + 1 < stages:
                    activation_s[stage + 1, chunk] = clock + p2p_s[chunk]
                elif code >= 0:
                    gradient_s[stage, chunk] = clock
                result[stage, used[stage]] = code
                used[stage] += 1
                alive[stage] = current - removed_bytes(amounts, stage, code, count)
                clock_s[stage], done[stage], has_moved = clock, at + 1, True
    for stage in range(stages):
        for at in range(first[stage], end[stage]):
            result[stage, used[stage]] = SPLIT + left[stage, at]
            used[stage] += 1
    return result


@compiled("(int64[:,::1], float64[:,::1], float64[:,::1], float64[::1])")
def join_backwards(
    operations: IntArray, start_s: FloatArray, end_s: FloatArray, p2p_s: FloatArray
) -> IntArray:
    """The operations with each I before its own W made a B where no stage waits for its gradient.

    `start_s` and `end_s` [p, m] are those of the operations. A stage starts the chunk's backward no
    later than before, so no operation does.
    """
    stages, length = operations.shape
    result = np.full((stages, length), NOTHING, dtype=np.int64)
    needed_s = np.full((stages + 1, p2p_s.size), np.inf)  # when the stage before starts its part
    for stage in range(stages - 1):
        for at in range(length):
            code = operations[stage, at]
            if code < 0:
                chunk = -code - 1 - SPLIT if code < -SPLIT else -code - 1
                needed_s[stage + 1, chunk] = start_s[stage, at]
    for stage in range(stages):
        used = at = 0
        while at < length:
            code = operations[stage, at]
            chunk = -code - 1 - SPLIT
            is_own = (
                code < -SPLIT and at + 1 < length and operations[stage, at + 1] == SPLIT + chunk
            )
            if is_own and end_s[stage, at + 1] + p2p_s[chunk] <= needed_s[stage, chunk]:
                code += SPLIT
                at += 1
            if code != NOTHING:
                result[stage, used] = code
                used += 1
            at += 1
    return result
