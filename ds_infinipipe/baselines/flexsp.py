"""FlexSP: each micro-batch splits the devices into Ulysses groups of different degrees.

Sequences are sorted by length and dealt into micro-batches of about equal tokens; for each one
the devices are parted into power-of-two groups (at most three degrees and sixteen groups), and
sequences, longest first, go to the group that would finish first. The best partition is taken.

Coarse: the original solves an integer program for partition and assignment, this is greedy, but it
tries every partition; switching groups costs nothing here. See `groups` for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_infinipipe.baselines.groups import (
    GroupModel,
    group_model,
    paper_recompute_layers,
    powers_of_two,
)
from ds_infinipipe.baselines.result import (
    PAPER,
    TUNED,
    BaselineResult,
    Workload,
    fastest,
    infeasible,
)

__all__ = ["flexsp", "partitions"]

NAME = "FlexSP"
_GIB = 2**30
_MOST_DEGREES = 3
_MOST_GROUPS = 16
_ROUND_FACTORS = (1.15, 1.5, 2.0)


def flexsp(workload: Workload) -> tuple[BaselineResult, ...]:
    """The paper's checkpointing (36 layers for 30B, else none), then the best of three levels."""
    num_layers = workload.setup.model.num_layers
    levels = sorted({0, num_layers // 2, num_layers})
    paper = _run(workload, PAPER, paper_recompute_layers(workload.setup.model))
    tuned = [_run(workload, TUNED, layers) for layers in levels]
    return (paper, fastest([*tuned, replace(paper, configuration=TUNED)]))


def partitions(num_devices: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Group degrees, descending, that add up to the devices; at most 3 different, 16 in all."""

    def extend(
        left: int, allowed: Sequence[int], chosen: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield chosen
            return
        if not allowed or len(chosen) >= _MOST_GROUPS:
            return
        degree = allowed[0]
        is_full = len(set(chosen)) == _MOST_DEGREES
        for count in range(0 if is_full else left // degree, -1, -1):
            if len(chosen) + count <= _MOST_GROUPS:
                yield from extend(left - count * degree, allowed[1:], chosen + (degree,) * count)

    yield from extend(num_devices, sorted(degrees, reverse=True), ())


@dataclass(frozen=True)
class _Rates:
    """Linear part of a group's time, for the greedy choice, and its token capacity."""

    token_s: float
    area_s: float
    capacity: int


@dataclass(frozen=True)
class _Round:
    """One micro-batch: (degree, tokens, area, seconds) of each group that has sequences."""

    time_s: float
    groups: tuple[tuple[int, int, int, float], ...]


def _run(workload: Workload, configuration: str, layers: int) -> BaselineResult:
    note = f"{layers} layers recomputed"
    found = (
        group_model(workload, degree, layers) for degree in powers_of_two(workload.num_devices)
    )
    models = {group.degree: group for group in found if group is not None}
    rates = {degree: _rates(group, workload.setup.limit_bytes) for degree, group in models.items()}
    largest = max((r.capacity for r in rates.values()), default=0)
    if largest < workload.longest:
        limit = f"{workload.setup.limit_bytes / _GIB:.2f} GiB"
        return infeasible(
            NAME, configuration, f"{note}: {limit} hold {largest:,} tokens, not the longest"
        )
    parts = [p for p in partitions(workload.num_devices, tuple(models))]
    per_device = max(r.capacity / degree for degree, r in rates.items())
    fewest = math.ceil(workload.num_tokens / (per_device * workload.num_devices))
    plans = (
        _plan(workload, math.ceil(factor * fewest), parts, models, rates)
        for factor in _ROUND_FACTORS
    )
    planned = [plan for plan in plans if plan is not None]
    if not planned:
        return infeasible(NAME, configuration, f"{note}: no partition holds every micro-batch")
    best = min(planned, key=lambda rounds: sum(r.time_s for r in rounds))
    return _result(workload, configuration, best, models, note)


def _rates(group: GroupModel, limit_bytes: int) -> _Rates:
    tokens, areas = np.array([1e5, 2e5, 1e5]), np.array([1e9, 1e9, 2e9])
    base, more_tokens, more_area = group.times(tokens, areas).tolist()
    return _Rates(
        (more_tokens - base) / 1e5, (more_area - base) / 1e9, group.token_capacity(limit_bytes)
    )


def _plan(
    workload: Workload,
    num_rounds: int,
    parts: Sequence[tuple[int, ...]],
    models: Mapping[int, GroupModel],
    rates: Mapping[int, _Rates],
) -> list[_Round] | None:
    """Best partition for each of `num_rounds` micro-batches; None where one has none."""
    rounds = []
    for lengths in _deal(sorted(workload.lengths, reverse=True), num_rounds):
        best: _Round | None = None
        for part in parts:
            candidate = _balance(lengths, part, models, rates)
            if candidate is not None and (best is None or candidate.time_s < best.time_s):
                best = candidate
        if best is None:
            return None
        rounds.append(best)
    return rounds


def _deal(ordered: Sequence[int], num_rounds: int) -> list[list[int]]:
    """Sorted lengths into consecutive runs of about equal tokens, none empty."""
    target = sum(ordered) / num_rounds
    runs: list[list[int]] = [[]]
    passed = 0
    for length in ordered:
        if runs[-1] and passed + length / 2 > target * len(runs) and len(runs) < num_rounds:
            runs.append([])
        runs[-1].append(length)
        passed += length
    return runs


def _balance(
    lengths: Sequence[int],
    part: Sequence[int],
    models: Mapping[int, GroupModel],
    rates: Mapping[int, _Rates],
) -> _Round | None:
    """Longest first, each to the group that would finish first; None where one has no room."""
    if rates[part[0]].capacity < lengths[0]:
        return None
    size = len(part)
    token_s = np.array([rates[degree].token_s for degree in part])
    area_s = np.array([rates[degree].area_s for degree in part])
    room = np.array([rates[degree].capacity for degree in part], dtype=np.float64)
    if room.sum() < sum(lengths):
        return None
    loads, tokens, areas = np.zeros(size), np.zeros(size), np.zeros(size)
    area_of = models[part[0]].cost.area.before
    for length in lengths:
        after = loads + token_s * length + area_s * area_of(length)
        after[tokens + length > room] = np.inf
        chosen = int(after.argmin())
        if after[chosen] == np.inf:
            return None
        loads[chosen] = after[chosen]
        tokens[chosen] += length
        areas[chosen] += area_of(length)
    groups = []
    for number, degree in enumerate(part):
        if tokens[number]:
            where = slice(number, number + 1)
            time_s = float(models[degree].times(tokens[where], areas[where])[0])
            groups.append((degree, int(tokens[number]), int(areas[number]), time_s))
    return _Round(max(group[3] for group in groups), tuple(groups))


def _result(
    workload: Workload,
    configuration: str,
    rounds: Sequence[_Round],
    models: Mapping[int, GroupModel],
    note: str,
) -> BaselineResult:
    step_time_s = sum(r.time_s for r in rounds)
    busy_s = communication_s = recompute_s = 0.0
    peak_bytes = 0
    for degree, tokens, area, time_s in (group for r in rounds for group in r.groups):
        group, one = models[degree], (np.array([float(tokens)]), np.array([float(area)]))
        busy_s += degree * time_s
        communication_s += degree * float(group.communication_times(*one)[0])
        recompute_s += degree * float(group.recompute_times(*one)[0])
        peak_bytes = max(peak_bytes, group.peak_bytes(tokens))
    devices = workload.num_devices
    used = sorted({group[0] for r in rounds for group in r.groups})
    return BaselineResult(
        name=NAME,
        configuration=configuration,
        step_time_s=step_time_s,
        tokens_per_s=workload.num_tokens / step_time_s,
        bubble_ratio=1.0 - busy_s / (devices * step_time_s),
        communication_s=communication_s / devices,
        recompute_s=recompute_s / devices,
        peak_bytes=peak_bytes,
        feasible=True,
        note=f"{note}, {len(rounds)} rounds, SP {', '.join(map(str, used))}",
    )
