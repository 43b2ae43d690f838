"""Compiled walks of the planner: order of operations, their times, their bytes.

One walk for each. search/lean/split_kernels.py walks too, deciding as it goes, with the same steps:
`ends_s` for times, `added_bytes`, `transient_bytes` and `removed_bytes` for bytes. Only schedule.py
and ledger.py call the walks, with arrays whose types match; importing this file imports numba and
compiles or loads the kernels, so it is done late. An operation is an int64 as plan/stream.py has
it. p counts stages, n chunks, m operations of a stage, bytes are int64, times float64 seconds. The
readable specifications are in tests/oracles; tests compare all results with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numba import float64, int64
from numpy.typing import NDArray

from ds_infinipipe.planner.plan.stream import NOTHING, SPLIT

__all__ = [
    "BYTES",
    "FLOATS",
    "INTS",
    "TIMES",
    "Bytes",
    "Times",
    "added_bytes",
    "binding_rows",
    "build_operations",
    "chunk_of",
    "compiled",
    "ends_s",
    "peak_bytes",
    "removed_bytes",
    "simulate_operations",
    "stage_moments",
    "transfer_bytes",
    "transient_bytes",
    "walk_bytes",
]

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

_log = logging.getLogger(__name__)


class Times(NamedTuple):
    """Seconds of every chunk's operations on every stage, [p, n] but for `p2p_s`."""

    forward_s: FloatArray
    backward_s: FloatArray
    input_s: FloatArray
    weight_s: FloatArray
    recompute_s: FloatArray
    """Of all layers that the stage recomputes for the chunk."""
    p2p_s: FloatArray
    """[n], of one transfer."""


class Bytes(NamedTuple):
    """What the operations of every chunk add on every stage, need meanwhile, and remove."""

    static: IntArray
    """[p], model states."""
    layers: IntArray
    """[p]"""
    saving: IntArray
    """[n], what a recomputed layer keeps less."""
    entered: IntArray
    """[p, n], added at the start of F with nothing recomputed."""
    gradient: IntArray
    """[p, n], added at the start of B or I: dK and dV of a tail."""
    released: IntArray
    """[p, n], removed at the end of B or I with nothing recomputed."""
    transients: IntArray
    """[F or B, none or some or all layers recomputed, p, n], while F or B runs."""
    stashed: IntArray
    """[p, n], from the end of I to that of W."""
    weight_transient: IntArray
    """[p, n], while W runs."""
    input_figures: IntArray
    """[p, n, 4], those of MemoryModel.input_figures. Without I and W the last three are empty."""


INTS = {0: int64} | {n: numba.types.Array(int64, n, "C") for n in (1, 2, 3, 4)}
FLOATS = {0: float64} | {n: numba.types.Array(float64, n, "C") for n in (1, 2)}


def _named(kind: type, axes: tuple[Any, ...]) -> Any:
    named: Any = numba.types.NamedTuple  # no types of its own
    return named(axes, kind)


TIMES = _named(Times, (*[FLOATS[2]] * 5, FLOATS[1]))
BYTES = _named(Bytes, tuple(INTS[n] for n in (1, 1, 1, 2, 2, 2, 4, 2, 2, 3)))


def compiled(signature: Any) -> Callable[[_Kernel], _Kernel]:
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


def step(function: _Kernel) -> _Kernel:
    """A part of kernels, compiled into each: a call would count references to all its arrays."""
    return cast(_Kernel, numba.njit(inline="always")(function))


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


@step
def chunk_of(code: int) -> int:
    """Chunk of an operation that is not NOTHING."""
    if code >= SPLIT:
        return code - SPLIT
    if code >= 0:
        return code
    return -code - 1 - SPLIT if code < -SPLIT else -code - 1


@compiled(float64(TIMES, int64, int64, float64))
def ends_s(times: Times, stage: int, code: int, start_s: float) -> float:
    """End of an operation that starts at `start_s`."""
    if code == NOTHING:
        return start_s
    chunk = chunk_of(code)
    if code >= SPLIT:
        return float(start_s + times.weight_s[stage, chunk])
    if code >= 0:
        return float(start_s + times.forward_s[stage, chunk])
    own_s = times.input_s[stage, chunk] if code < -SPLIT else times.backward_s[stage, chunk]
    # added apart, in this order, so that sums round as the specification's do
    return float(start_s + own_s + times.recompute_s[stage, chunk])


@compiled((INTS[2], TIMES))
def simulate_operations(
    operations: IntArray, times: Times
) -> tuple[FloatArray, FloatArray, FloatArray, IntArray]:
    """Starts and ends [p, m], busy times [p], operations done [p]: fewer than m is a deadlock."""
    stages, length = operations.shape
    p2p_s = times.p2p_s
    start_s = np.zeros((stages, length))
    end_s = np.zeros((stages, length))
    busy_s = np.zeros(stages)
    clock_s = np.zeros(stages)
    done = np.zeros(stages, dtype=np.int64)
    activation_s = np.full((stages, p2p_s.size), -1.0)  # arrivals; negative: not sent yet
    gradient_s = np.full((stages, p2p_s.size), -1.0)
    activation_s[0, :] = 0.0
    has_moved = True
    while has_moved:
        has_moved = False
        for stage in range(stages):
            clock, at = clock_s[stage], done[stage]
            while at < length:
                code = operations[stage, at]
                start = clock
                # a call in every branch: the compiler then drops the tests inside of it
                if code >= SPLIT:
                    clock = ends_s(times, stage, code, start)
                elif code >= 0:
                    if activation_s[stage, code] < 0.0:
                        break
                    start = max(activation_s[stage, code], clock)
                    clock = ends_s(times, stage, code, start)
                    if stage + 1 < stages:
                        activation_s[stage + 1, code] = clock + p2p_s[code]
                    else:
                        gradient_s[stage, code] = clock
                else:
                    chunk = chunk_of(code)
                    if gradient_s[stage, chunk] < 0.0:
                        break
                    start = max(gradient_s[stage, chunk], clock)
                    clock = ends_s(times, stage, code, start)
                    if stage > 0:
                        gradient_s[stage - 1, chunk] = clock + p2p_s[chunk]
                start_s[stage, at] = start
                end_s[stage, at] = clock
                busy_s[stage] += clock - start
                at += 1
            has_moved |= at > done[stage]
            clock_s[stage], done[stage] = clock, at
    return start_s, end_s, busy_s, done


@step
def _input_transient(layers: int, count: int, figures: IntArray) -> int:
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
    """Bytes in transfer beside every operation [p, m]; `hidden` [n] are those of hidden states.

    The output of a stage's own F and what came for its own B count, what came for F is the chunk's,
    and the gradient that B makes is a part of its work. Receives count from where plan/lower.py
    posts them. See plan/transfers.py.
    """
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
                chunk = chunk_of(operation)
                forwards_before[stage, backwards] = forwards
                backwards += 1
                returned[backwards] = returned[backwards - 1] + hidden[chunk]
    for stage in range(stages):
        has_next, has_previous = stage + 1 < stages, stage > 0
        forwards = backwards = following = 0
        for at in range(length):
            operation = operations[stage, at]
            # of this operation: an F, a B or I; of the next such one beside a W
            entered, made, awaits_forward, awaits_backward = 0, 0, 0, 0
            if operation < 0:
                made = 1
            elif operation < SPLIT:
                entered = 1
            else:
                following = max(following, at)
                while following < length and operations[stage, following] >= SPLIT:
                    following += 1
                if following < length:
                    awaits_forward = int(operations[stage, following] >= 0)
                    awaits_backward = 1 - awaits_forward
            forwards += entered
            backwards += made
            if has_next:
                taken = forwards_before[stage + 1, backwards - 1] if backwards > 0 else 0
                result[stage, at] += sent[forwards] - sent[taken]
                posted, known = backwards + awaits_backward, forwards - entered - 2
                if known >= 0:
                    posted = max(posted, backwards_before[stage + 1, known])
                result[stage, at] += returned[posted] - returned[backwards - made]
            if has_previous:
                taken = backwards_before[stage - 1, forwards - 1] if forwards > 0 else 0
                result[stage, at] += returned[backwards - made] - returned[taken]
                posted, known = forwards + awaits_forward, backwards - made - 2
                if known >= 0:
                    posted = max(posted, forwards_before[stage - 1, known])
                result[stage, at] += sent[posted] - sent[forwards]
    return result


@step
def added_bytes(amounts: Bytes, stage: int, code: int, count: int) -> int:
    """What an operation adds at its start, `count` layers of its chunk being recomputed."""
    if code >= SPLIT:
        return 0
    if code >= 0:
        return int(amounts.entered[stage, code] - count * amounts.saving[code])
    return int(amounts.gradient[stage, chunk_of(code)])


@step
def transient_bytes(amounts: Bytes, stage: int, code: int, count: int) -> int:
    """What lives only while an operation runs, on top of what it has added."""
    chunk, layers = chunk_of(code), amounts.layers[stage]
    if code >= SPLIT:
        return int(amounts.weight_transient[stage, chunk])
    if code < -SPLIT:
        return _input_transient(layers, count, amounts.input_figures[stage, chunk])
    extent = 0 if count == 0 else 1 if count < layers else 2
    return int(amounts.transients[1 if code < 0 else 0, extent, stage, chunk])


@step
def removed_bytes(amounts: Bytes, stage: int, code: int, count: int) -> int:
    """What is gone after an operation, less what I leaves for W."""
    if 0 <= code < SPLIT:
        return 0
    chunk = chunk_of(code)
    if code >= SPLIT:
        return int(amounts.stashed[stage, chunk])
    gone = amounts.released[stage, chunk] - count * amounts.saving[chunk]
    return int(gone - amounts.stashed[stage, chunk] if code < -SPLIT else gone)


@compiled((INTS[2], BYTES, INTS[2], INTS[1], INTS[0], numba.boolean))
def walk_bytes(
    operations: IntArray,
    amounts: Bytes,
    transfers: IntArray,
    counts: IntArray,
    stage: int,
    is_after: bool,
) -> tuple[IntArray, IntArray, int]:
    """Of one stage: bytes alive beside every operation, and only while it runs [m]; peak of both.

    It recomputes counts[k] layers of chunk k (Eq. 8); `transfers` [p, m] are alive beside its
    operations. With `is_after` the first are what is left when an operation is over, no transfers.
    Beside NOTHING only the model states are alive.
    """
    length = operations.shape[1]
    alive = np.empty(length, dtype=np.int64)
    transient = np.zeros(length, dtype=np.int64)
    alive[:] = current = peak = amounts.static[stage]
    for at in range(length):
        code = operations[stage, at]
        if code == NOTHING:
            break
        count = counts[chunk_of(code)]
        current += added_bytes(amounts, stage, code, count)
        beside = current + transfers[stage, at]
        meanwhile = transient_bytes(amounts, stage, code, count)
        peak = max(peak, beside + meanwhile)
        current -= removed_bytes(amounts, stage, code, count)
        alive[at] = current if is_after else beside
        transient[at] = meanwhile
    return alive, transient, peak


@compiled((INTS[2], BYTES, INTS[2], INTS[2]))
def peak_bytes(
    operations: IntArray, amounts: Bytes, transfers: IntArray, counts: IntArray
) -> IntArray:
    """Peaks [p] where stage p recomputes counts[p, k] layers of chunk k."""
    peaks = np.empty(operations.shape[0], dtype=np.int64)
    for stage in range(peaks.size):
        peaks[stage] = walk_bytes(operations, amounts, transfers, counts[stage], stage, False)[2]
    return peaks


@compiled((INTS[2], BYTES, INTS[2], INTS[0]))
def stage_moments(
    operations: IntArray, amounts: Bytes, transfers: IntArray, stage: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Base, plain and full transient, and most saving [m], as ledger.StageMoments has them."""
    layers = amounts.layers[stage]
    counts = np.zeros(amounts.saving.size, dtype=np.int64)
    base, plain, _ = walk_bytes(operations, amounts, transfers, counts, stage, False)
    counts[:] = min(1, layers - 1)
    _, some, _ = walk_bytes(operations, amounts, transfers, counts, stage, False)
    counts[:] = layers
    least, every, _ = walk_bytes(operations, amounts, transfers, counts, stage, False)
    return base, np.maximum(plain, some), every, base - least


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
