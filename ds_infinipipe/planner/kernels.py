"""Compiled inner loops of the planner: operation lists, simulation, memory scans.

Only schedule_arrays.py and memory_arrays.py call these, with arrays whose types match; importing
this file imports numba and compiles or loads the kernels, so it is done late. An operation is an
int64 as codes.py has it; only simulation and peaks know I and W. p counts stages, n chunks, m
operations of a stage, bytes are int64, times float64 seconds. The readable specifications are
order.py, simulate.py, MemoryModel.peak_bytes and rows.py; tests compare all results with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.codes import NOTHING, SPLIT

__all__ = [
    "binding_rows",
    "build_operations",
    "compiled",
    "input_transient",
    "peak_bytes",
    "scan_moments",
    "simulate_operations",
    "transfer_bytes",
]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

_log = logging.getLogger(__name__)


def compiled(signature: str) -> Callable[[_Kernel], _Kernel]:
    """Compile for one signature; the machine code is cached beside this file or in numba's folder.

    Whatever is wrong with the cache (no folder to write, a full disk, a damaged entry) costs a
    compilation and nothing else; an error of the kernel itself shows in the second attempt.
    """

    def compile_kernel(function: _Kernel) -> _Kernel:
        kernel: Any
        try:
            kernel = numba.njit(signature, cache=True)(function)
        except Exception as error:
            _log.debug("%s is compiled without a cache: %r", function.__name__, error)
            kernel = numba.njit(signature)(function)
        return cast(_Kernel, kernel)

    return compile_kernel


_compiled = compiled


@compiled("(int64[::1], int64[::1], int64[:,::1])")
def build_operations(
    forward: IntArray, backward: IntArray, windows: IntArray
) -> tuple[IntArray, int, int]:
    """Operations [p, 2n] of chunk ids in forward and backward order [n] under windows [p, n].

    Also the stage and position of the first backward that would precede its forward, else -1, -1.
    """
    stages, length = windows.shape
    operations = np.empty((stages, 2 * length), dtype=np.int64)
    place = np.empty(0 if length == 0 else forward.max() + 1, dtype=np.int64)
    for position in range(length):
        place[forward[position]] = position
    for stage in range(stages):
        issued = at = 0
        for position in range(length):
            ahead = min(length, position + windows[stage, position])
            while issued < ahead:
                operations[stage, at] = forward[issued]
                issued += 1
                at += 1
            if place[backward[position]] >= issued:
                return operations, stage, position
            operations[stage, at] = -backward[position] - 1
            at += 1
    return operations, -1, -1


_TIMES = ", ".join(["float64[:,::1]"] * 5)


@compiled(f"(int64[:,::1], {_TIMES}, float64[::1])")
def simulate_operations(
    operations: IntArray,
    forward_s: FloatArray,
    backward_s: FloatArray,
    input_s: FloatArray,
    weight_s: FloatArray,
    recompute_s: FloatArray,
    p2p_s: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray, IntArray]:
    """Starts and ends [p, m], busy times [p], operations done [p]: fewer than m is a deadlock.

    Times of F, B, I and W and `recompute_s` are [p, n]; the last is the recompute time of all its
    layers. Added apart, in this order, so that sums round as those of simulate.py do.
    """
    stages, length = operations.shape
    chunks = p2p_s.size
    start_s = np.zeros((stages, length))
    end_s = np.zeros((stages, length))
    busy_s = np.zeros(stages)
    clock_s = np.zeros(stages)
    done = np.zeros(stages, dtype=np.int64)
    activation_s = np.full((stages, chunks), -1.0)  # arrivals; negative: not sent yet
    gradient_s = np.full((stages, chunks), -1.0)
    activation_s[0, :] = 0.0
    has_moved = True
    while has_moved:
        has_moved = False
        for stage in range(stages):
            clock, at = clock_s[stage], done[stage]
            while at < length:
                operation = operations[stage, at]
                start = clock
                if operation >= SPLIT:
                    if operation != NOTHING:
                        clock = start + weight_s[stage, operation - SPLIT]
                elif operation >= 0:
                    arrival = activation_s[stage, operation]
                    if arrival < 0.0:
                        break
                    start = max(arrival, clock)
                    clock = start + forward_s[stage, operation]
                    if stage + 1 < stages:
                        activation_s[stage + 1, operation] = clock + p2p_s[operation]
                    else:
                        gradient_s[stage, operation] = clock
                else:
                    is_split = operation < -SPLIT
                    chunk = -operation - 1 - SPLIT if is_split else -operation - 1
                    arrival = gradient_s[stage, chunk]
                    if arrival < 0.0:
                        break
                    start = max(arrival, clock)
                    own_s = input_s[stage, chunk] if is_split else backward_s[stage, chunk]
                    clock = start + own_s + recompute_s[stage, chunk]
                    if stage > 0:
                        gradient_s[stage - 1, chunk] = clock + p2p_s[chunk]
                start_s[stage, at] = start
                end_s[stage, at] = clock
                busy_s[stage] += clock - start
                at += 1
            has_moved |= at > done[stage]
            clock_s[stage], done[stage] = clock, at
    return start_s, end_s, busy_s, done


@compiled("int64(int64, int64, int64[::1])")
def input_transient(layers: int, count: int, figures: IntArray) -> int:
    """MemoryModel.input_transient from its input_figures."""
    growth, rebuilt, absent, workspace = figures
    kept, last = layers - count, layers - 1
    most = np.int64(-(2**62))
    if kept > 0:
        most = max(-last * absent, (kept - 1) * growth - count * absent)
    if count > 0:
        first = kept * growth + rebuilt - (last - kept) * absent
        most = max(most, first, last * growth + (last - kept + 1) * rebuilt)
    return int(most + workspace)


@compiled("int64[:,::1](int64[:,::1], int64[::1])")
def transfer_bytes(operations: IntArray, hidden: IntArray) -> IntArray:
    """transfers.transfer_bytes, [p, m], from the hidden states' bytes of every chunk [n]."""
    stages, length = operations.shape
    chunks = hidden.size
    result = np.zeros((stages, length), dtype=np.int64)
    # before the next of each kind, by how many of it there were
    forwards_before = np.zeros((stages, chunks + 1), dtype=np.int64)
    backwards_before = np.zeros((stages, chunks + 1), dtype=np.int64)
    sent = np.zeros(chunks + 1, dtype=np.int64)
    returned = np.zeros(chunks + 1, dtype=np.int64)
    for stage in range(stages):
        forwards = backwards = 0
        for at in range(length):
            operation = operations[stage, at]
            if operation >= SPLIT:
                continue
            if operation >= 0:
                backwards_before[stage, forwards] = backwards
                forwards += 1
                sent[forwards] = sent[forwards - 1] + hidden[operation]
            else:
                chunk = -operation - 1 - SPLIT if operation < -SPLIT else -operation - 1
                forwards_before[stage, backwards] = forwards
                backwards += 1
                returned[backwards] = returned[backwards - 1] + hidden[chunk]
    for stage in range(stages):
        has_next, has_previous = stage + 1 < stages, stage > 0
        forwards = backwards = 0
        for at in range(length):
            operation = operations[stage, at]
            made = received = 0
            if operation < 0:
                chunk = -operation - 1 - SPLIT if operation < -SPLIT else -operation - 1
                backwards += 1
                made, received = 1, hidden[chunk]
            elif operation < SPLIT:
                forwards += 1
            if has_next:
                taken = forwards_before[stage + 1, backwards - 1] if backwards > 0 else 0
                result[stage, at] += sent[forwards] - sent[taken] + received
            if has_previous:
                taken = backwards_before[stage - 1, forwards - 1] if forwards > 0 else 0
                result[stage, at] += returned[backwards - made] - returned[taken]
        ahead = 0
        for at in range(length - 1, -1, -1):
            operation = operations[stage, at]
            result[stage, at] += ahead
            if operation < 0:
                chunk = -operation - 1 - SPLIT if operation < -SPLIT else -operation - 1
                ahead = hidden[chunk] if has_next else 0
            elif operation < SPLIT:
                ahead = hidden[operation] if has_previous else 0
    return result


_MEMORY = "int64[:,::1], int64[::1], int64[:,::1], int64[:,::1], int64[:,::1], int64[::1], "


@compiled(
    f"({_MEMORY} int64[:,:,:,::1], int64[:,::1], int64[::1], int64[:,::1], int64[:,::1],"
    "int64[:,::1], int64[:,:,::1])"
)
def peak_bytes(
    operations: IntArray,
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
) -> IntArray:
    """Peaks [p] when stage p recomputes counts[p, k] layers of chunk k (Eq. 8).

    With nothing recomputed F(k) adds entered[p, k], B(k) adds gradient[p, k] at its start and
    removes released[p, k] at its end; each recomputed layer keeps saving[k] less. `transients` are
    [F or B, none or some or all layers recomputed, p, n], `transfers` [p, m], `layers` [p]. I(k)
    also adds stashed[p, k] at its end, which W(k) removes; `input_figures` are [p, n, 4]. Without I
    and W in the operations the last three may be of any size.
    """
    stages, length = operations.shape
    peaks = static.copy()
    for stage in range(stages):
        current = peak = np.int64(0)
        for at in range(length):
            operation = operations[stage, at]
            if operation >= SPLIT:
                if operation != NOTHING:
                    chunk = operation - SPLIT
                    needed = weight_transient[stage, chunk] + transfers[stage, at]
                    peak = max(peak, current + needed)
                    current -= stashed[stage, chunk]
                continue
            is_backward = 1 if operation < 0 else 0
            is_split = operation < -SPLIT
            chunk = -operation - 1 if operation < 0 else operation
            if is_split:
                chunk -= SPLIT
            count = counts[stage, chunk]
            saved = count * saving[chunk]
            current += gradient[stage, chunk] if is_backward else entered[stage, chunk] - saved
            if is_split:
                transient = input_transient(layers[stage], count, input_figures[stage, chunk])
            else:
                extent = 0 if count == 0 else 1 if count < layers[stage] else 2
                transient = transients[is_backward, extent, stage, chunk]
            peak = max(peak, current + transient + transfers[stage, at])
            if is_backward:
                current -= released[stage, chunk] - saved
            if is_split:
                current += stashed[stage, chunk]
        peaks[stage] += peak
    return peaks


@compiled(f"({_MEMORY} int64[:,:,:,::1], int64[:,::1])")
def scan_moments(
    operations: IntArray,
    static: IntArray,
    entered: IntArray,
    gradient: IntArray,
    released: IntArray,
    saving: IntArray,
    transients: IntArray,
    transfers: IntArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Base, plain and charged transient, and live saving [p, m], as rows.StageMoments has them.

    Plain is the larger of a chunk's transients with none and with some layers recomputed, charged
    also counts all of them recomputed.
    """
    stages, length = operations.shape
    base = np.empty((stages, length), dtype=np.int64)
    plain, charged, live_saving = np.empty_like(base), np.empty_like(base), np.empty_like(base)
    for stage in range(stages):
        current, live = static[stage], np.int64(0)
        for at in range(length):
            operation = operations[stage, at]
            is_backward = 1 if operation < 0 else 0
            chunk = -operation - 1 if operation < 0 else operation
            if is_backward:
                current += gradient[stage, chunk]
            else:
                current += entered[stage, chunk]
                live += saving[chunk]
            base[stage, at] = current + transfers[stage, at]
            live_saving[stage, at] = live
            none, some, every = transients[is_backward, :, stage, chunk]
            plain[stage, at] = max(none, some)
            charged[stage, at] = max(none, some, every)
            if is_backward:
                current -= released[stage, chunk]
                live -= saving[chunk]
    return base, plain, charged, live_saving


@compiled("(int64[::1], int64[::1], int64[::1], int64[::1])")
def binding_rows(
    operations: IntArray, keeps: IntArray, need: IntArray, saving: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Rows of one stage's moments i with keeps[i] != 0, in compressed form.

    `need` is per moment. Returns the need [row], offsets [row + 1] and chunks [entry] of the live
    sets, each in forward order.
    """
    length = operations.size
    order = np.empty(length, dtype=np.int64)  # chunks in the order of their forwards
    is_live = np.zeros(saving.size, dtype=np.bool_)
    num_rows = int(np.count_nonzero(keeps))
    row_need = np.empty(num_rows, dtype=np.int64)
    offsets = np.zeros(num_rows + 1, dtype=np.int64)
    members = np.empty(max(16, 8 * num_rows), dtype=np.int64)
    row = first = issued = 0
    for at in range(length):
        operation = operations[at]
        chunk = -operation - 1 if operation < 0 else operation
        if operation >= 0:
            order[issued] = chunk
            issued += 1
            is_live[chunk] = True
        if keeps[at]:
            used = offsets[row]
            if used + issued - first > members.size:
                larger = np.empty(2 * members.size + issued - first, dtype=np.int64)
                larger[:used] = members[:used]
                members = larger
            for position in range(first, issued):
                if is_live[order[position]]:
                    members[used] = order[position]
                    used += 1
            row_need[row] = need[at]
            row += 1
            offsets[row] = used
        if operation < 0:
            is_live[chunk] = False
            while first < issued and not is_live[order[first]]:
                first += 1
    return row_need, offsets, members[: offsets[num_rows]].copy()
