"""How many groups a run makes, whatever its layout, and which ranks are in them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as torch_dist
from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_infinipipe.runtime.ranks.grid import InfiniPipeGrid

_TIMEOUT = timedelta(seconds=1)


class _Groups:
    """Stands for torch.distributed; a group is the ranks it has."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        self.made: list[list[int] | None] = []
        self.splits: list[list[list[int]]] = []
        self._rank = rank
        world = SimpleNamespace(bound_device_id="cuda:0")
        monkeypatch.setattr(torch_dist, "get_backend", lambda *_: backend)
        monkeypatch.setattr(torch_dist, "new_group", self._new)
        monkeypatch.setattr(torch_dist, "split_group", self._split)
        monkeypatch.setattr(dist, "get_world_group", lambda: world)

    def _new(self, ranks: Sequence[int] | None = None, **_: Any) -> list[int]:
        self.made.append(None if ranks is None else list(ranks))
        return [] if ranks is None else list(ranks)

    def _split(self, _: Any, parts: list[list[int]], **__: Any) -> list[int] | None:
        self.splits.append(parts)
        assert len({rank for part in parts for rank in part}) == sum(map(len, parts))
        return next((part for part in parts if self._rank in part), None)


def _grid(dims: tuple[int, int, int], rank: int) -> InfiniPipeGrid:
    """Of replicas, stages and sequence-parallel ranks, without DeepSpeed's own groups."""
    topology = ProcessTopology(axes=["replica", "pipe", "data"], dims=list(dims))
    grid: Any = InfiniPipeGrid.__new__(InfiniPipeGrid)
    grid.__dict__.update(
        _topo=topology,
        global_rank=rank,
        stage_id=topology.get_coord(rank).pipe,
        dp_groups=topology.get_axis_comm_lists("data"),
        pipe_groups=topology.get_axis_comm_lists("pipe"),
        pp_proc_group="column",
        pp_group=next(g for g in topology.get_axis_comm_lists("pipe") if rank in g),
    )
    grid.add_groups(dims[2], _TIMEOUT)
    made: InfiniPipeGrid = grid
    return made


def _channels(grid: InfiniPipeGrid) -> list[Any]:
    return [
        grid.activations_in_pg,
        grid.activations_out_pg,
        grid.gradients_in_pg,
        grid.gradients_out_pg,
    ]


@pytest.mark.parametrize(
    ("dims", "most_splits"),
    [((1, 4, 8), 7), ((1, 16, 8), 7), ((4, 4, 8), 8), ((8, 4, 4), 8), ((128, 1, 1), 2)],
)
def test_nccl_splits_all_ranks_a_few_times_whatever_their_number(
    dims: tuple[int, int, int], most_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 32 and 128 ranks; the groups of gloo are one for all ranks, and one a replica."""
    groups = _Groups(5, monkeypatch, "nccl")
    _grid(dims, 5)
    assert len(groups.splits) == most_splits
    assert all(len(part) > 1 for parts in groups.splits for part in parts)
    assert len(groups.made) == (1 + dims[0] if dims[0] > 1 else 1)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("rank", range(12))
def test_every_edge_has_a_group_for_each_direction_and_no_rank_is_alone_in_one(
    rank: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = (2, 3, 2)  # replicas, stages, sequence-parallel ranks
    groups = _Groups(rank, monkeypatch, backend)
    grid = _grid(dims, rank)
    stage, step = rank // 2 % 3, dims[2]
    before = None if stage == 0 else [rank - step, rank]
    after = None if stage == 2 else [rank, rank + step]
    assert _channels(grid) == [before, after, after, before]
    assert grid.sequence_pg == grid.sequence_ranks == [rank - rank % 2, rank - rank % 2 + 1]
    assert grid.replica_pg == [rank % 6, rank % 6 + 6]
    column = rank // 6 * 6 + rank % 2
    assert grid.tied_pg == (None if stage == 1 else [column, column + 4])
    assert grid.gradient_pg is not None and len(grid.gradient_pg) == 4
    assert grid.plan_rank == rank // 6 * 6
    assert all(ranks is None or len(ranks) > 1 for ranks in groups.made)


def test_one_rank_has_no_group_but_the_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = _Groups(0, monkeypatch, "gloo")
    grid = _grid((1, 1, 1), 0)
    assert groups.made == [None] and grid.plan_pg is grid.control_pg
    assert [*_channels(grid), grid.sequence_pg, grid.tied_pg, grid.replica_pg] == [None] * 7
