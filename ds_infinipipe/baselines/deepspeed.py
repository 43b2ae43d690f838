"""DeepSpeed: ZeRO-3 over all devices, Ulysses groups of one degree, data parallelism over them.

Whole sequences are packed into micro-batches, by best fit or evenly by time, whichever is faster;
in each round every group runs one and waits for the slowest, since ZeRO's collectives join all
ranks. See `groups` for what is coarse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ds_infinipipe.baselines.groups import (
    GroupModel,
    group_model,
    paper_recompute_layers,
    powers_of_two,
)
from ds_infinipipe.baselines.packing import best_fit, lightest_bin_first
from ds_infinipipe.baselines.result import (
    PAPER,
    TUNED,
    BaselineResult,
    Workload,
    fastest,
    infeasible,
)

__all__ = ["deepspeed"]

NAME = "DeepSpeed ZeRO-3 + Ulysses"
_GIB = 2**30
_SMALL_MODEL_PARAMS = 10e9
_BIN_FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)


def deepspeed(workload: Workload) -> tuple[BaselineResult, ...]:
    """The paper's configuration (SP 16 for the 7B model, else 32), then the best SP degree."""
    model = workload.setup.model
    params = model.num_layers * model.layer_params + 2 * model.embedding_params
    degree = min(16 if params < _SMALL_MODEL_PARAMS else 32, workload.num_devices)
    paper = _run(workload, PAPER, degree, paper_recompute_layers(model))
    levels = sorted({round(model.num_layers * share / 4) for share in range(5)})
    results = [
        _run(workload, TUNED, degree, layers)
        for degree in powers_of_two(workload.num_devices)
        if workload.num_devices % degree == 0
        for layers in levels
    ]
    return (paper, fastest([*results, replace(paper, configuration=TUNED)]))


def _run(workload: Workload, configuration: str, degree: int, layers: int) -> BaselineResult:
    note = f"SP {degree}, {layers} layers recomputed"
    group = group_model(workload, degree, layers)
    if group is None:
        heads = workload.setup.model.num_heads
        return infeasible(NAME, configuration, f"{note}: cannot share {heads} heads")
    capacity = group.token_capacity(workload.setup.limit_bytes)
    if capacity < workload.longest:
        limit = f"{workload.setup.limit_bytes / _GIB:.2f} GiB"
        return infeasible(
            NAME, configuration, f"{note}: {limit} hold {capacity:,} tokens, not the longest"
        )
    groups = workload.num_devices // degree
    rounds = [_rounds(b, workload, group, groups) for b in _packings(workload, group, capacity)]
    tokens, areas, times = min(rounds, key=lambda r: float(r[2].max(axis=1).sum()))
    step_time_s = float(times.max(axis=1).sum())
    used = tokens > 0
    return BaselineResult(
        name=NAME,
        configuration=configuration,
        step_time_s=step_time_s,
        tokens_per_s=workload.num_tokens / step_time_s,
        bubble_ratio=1.0 - float(times.sum()) / (groups * step_time_s),
        communication_s=float(group.communication_times(tokens, areas)[used].sum()) / groups,
        recompute_s=float(group.recompute_times(tokens, areas)[used].sum()) / groups,
        peak_bytes=group.peak_bytes(int(tokens.max())),
        feasible=True,
        note=f"{note}, {len(times)} rounds of {groups} micro-batches",
    )


def _packings(workload: Workload, group: GroupModel, capacity: int) -> Iterable[list[list[int]]]:
    lengths = workload.lengths
    yield best_fit(lengths, capacity)
    groups = workload.num_devices // group.degree
    sizes = np.array(lengths, dtype=np.float64)
    weights = (
        group.times(sizes, group.cost.area.before(sizes)) - group.times(np.zeros(1), np.zeros(1))
    ).tolist()
    fewest = math.ceil(workload.num_tokens / (capacity * groups))
    for factor in _BIN_FACTORS:
        bins = lightest_bin_first(lengths, weights, groups * math.ceil(factor * fewest), capacity)
        if bins is not None:
            yield bins


def _rounds(
    bins: Sequence[Sequence[int]], workload: Workload, group: GroupModel, groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, areas and times of micro-batches [rounds, groups], like beside like; 0 if empty."""
    lengths = workload.lengths
    filled = [members for members in bins if members]
    size = -(-len(filled) // groups) * groups
    tokens, areas = np.zeros(size), np.zeros(size)
    for number, members in enumerate(filled):
        tokens[number] = sum(lengths[i] for i in members)
        areas[number] = sum(group.cost.area.before(lengths[i]) for i in members)
    times = np.where(tokens > 0, group.times(tokens, areas), 0.0)
    order = np.argsort(-times, kind="stable").reshape(-1, groups)
    return tokens[order], areas[order], times[order]
