"""Compiled inner loops that split backwards: a walk that fills waits, and what to join again.

Operations are numbers as in codes.py. p counts stages, n chunks, m operations of a stage, bytes are
int64, times float64 seconds. Memory is counted as in kernels.peak_bytes.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.codes import NOTHING, SPLIT
from ds_infinipipe.planner.kernels import compiled, input_transient

__all__ = ["fill_waits", "join_backwards"]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]

_TIMES = ", ".join(["float64[:,::1]"] * 5)
_BYTES = (
    "int64[::1], int64[:,::1], int64[:,::1], int64[:,::1], int64[::1], int64[:,:,:,::1],"
    "int64[:,::1], int64[::1], int64[:,::1], int64[:,::1], int64[:,::1], int64[:,:,::1]"
)


@compiled(f"(int64[:,::1], {_TIMES}, float64[::1], {_BYTES}, int64, int64[::1], float64)")
def fill_waits(
    operations: IntArray,
    forward_s: FloatArray,
    backward_s: FloatArray,
    input_s: FloatArray,
    weight_s: FloatArray,
    recompute_s: FloatArray,
    p2p_s: FloatArray,
    static: IntArray,
    entered: IntArray,
    gradient: IntArray,
    released: IntArray,
    saving: IntArray,
    transients: IntArray,
    transfers: IntArray,
    layers: IntArray,
    counts: IntArray,
    stashed: IntArray,
    weight_transient: IntArray,
    input_figures: IntArray,
    limit: int,
    most: IntArray,
    share: float,
) -> IntArray:
    """Operations [p, 3n] of F, I and W, or B where an I does not fit, in the order of the given.

    A stage runs a W where it would wait and at least `share` of it is over by then, where more than
    most[p] of them are left, and where the next operation would not fit the limit otherwise. The
    earliest start of all stages goes first.
    """
    stages, length = operations.shape
    chunks = p2p_s.size
    result = np.full((stages, 3 * length // 2), NOTHING, dtype=np.int64)
    used = np.zeros(stages, dtype=np.int64)
    left = np.zeros((stages, length // 2), dtype=np.int64)  # chunks whose W is to come
    first = np.zeros(stages, dtype=np.int64)
    end = np.zeros(stages, dtype=np.int64)
    clock_s = np.zeros(stages)
    done = np.zeros(stages, dtype=np.int64)
    current = static.copy()
    activation_s = np.full((stages, chunks), -1.0)
    gradient_s = np.full((stages, chunks), -1.0)
    activation_s[0, :] = 0.0
    while True:
        stage, start = -1, np.inf
        for p in range(stages):
            if done[p] < length:
                code = operations[p, done[p]]
                arrival = activation_s[p, code] if code >= 0 else gradient_s[p, -code - 1]
                if arrival >= 0.0 and max(arrival, clock_s[p]) < start:
                    stage, start = p, max(arrival, clock_s[p])
        if stage < 0:
            break
        code = operations[stage, done[stage]]
        moving = transfers[stage, done[stage]]
        done[stage] += 1
        is_forward = code >= 0
        chunk = code if is_forward else -code - 1
        count = counts[stage, chunk]
        extent = 0 if count == 0 else 1 if count < layers[stage] else 2
        saved = count * saving[chunk]
        added = entered[stage, chunk] - saved if is_forward else gradient[stage, chunk]
        need = added + moving + transients[0 if is_forward else 1, extent, stage, chunk]
        while first[stage] < end[stage]:
            late = left[stage, first[stage]]
            wait_s = start - clock_s[stage]
            fills = wait_s > 0.0 and share * weight_s[stage, late] <= wait_s
            is_full = end[stage] - first[stage] > most[stage]
            if not (fills or is_full or current[stage] + need > limit):
                break
            result[stage, used[stage]] = SPLIT + late
            used[stage] += 1
            first[stage] += 1
            clock_s[stage] += weight_s[stage, late]
            current[stage] -= stashed[stage, late]
        clock = max(start, clock_s[stage])
        current[stage] += added
        if is_forward:
            result[stage, used[stage]] = code
            clock += forward_s[stage, chunk]
            if stage + 1 < stages:
                activation_s[stage + 1, chunk] = clock + p2p_s[chunk]
            else:
                gradient_s[stage, chunk] = clock
        else:
            half = current[stage] + moving
            half += input_transient(layers[stage], count, input_figures[stage, chunk])
            current[stage] -= released[stage, chunk] - saved
            after = current[stage] + stashed[stage, chunk] + weight_transient[stage, chunk] + moving
            clock += recompute_s[stage, chunk]
            if max(half, after) <= limit:
                result[stage, used[stage]] = code - SPLIT
                clock += input_s[stage, chunk]
                current[stage] += stashed[stage, chunk]
                left[stage, end[stage]] = chunk
                end[stage] += 1
            else:
                result[stage, used[stage]] = code
                clock += backward_s[stage, chunk]
            if stage > 0:
                gradient_s[stage - 1, chunk] = clock + p2p_s[chunk]
        used[stage] += 1
        clock_s[stage] = clock
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
