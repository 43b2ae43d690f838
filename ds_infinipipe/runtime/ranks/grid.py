"""Process grid: replicas, in each of them pipeline stages, in each stage sequence-parallel ranks.

DeepSpeed's axis names are kept: 'data' is the axis ZeRO shards over, here the sp ranks of a stage,
so that the stages of one replica run one plan whatever the others do. 'replica' is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch.distributed as torch_dist
from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

__all__ = ["InfiniPipeGrid", "adopt_grid"]


class InfiniPipeGrid(PipelineParallelGrid):  # type: ignore[misc]
    """DeepSpeed's grid with sequence-parallel groups and groups for the transfers of each edge.

    Between two neighbouring stages each direction has a group of its own, so a communicator and a
    stream: no transfer waits for another that does not come before it on its channel. Those beyond
    the ends of the pipeline are None, as is any group that this rank would be alone in.

    It must not define `initialize_sequence_parallel`: the stage-3 optimizer takes that name as a
    sign that there is no model parallelism and drops the pipeline from the gradient norm.
    """

    sp_size: int
    sequence_ranks: list[int]
    sequence_pg: Any
    activations_in_pg: Any
    activations_out_pg: Any
    gradients_in_pg: Any
    gradients_out_pg: Any
    tied_pg: Any
    replica_pg: Any
    gradient_pg: Any
    plan_pg: Any
    control_pg: Any
    replica: int
    plan_rank: int

    def add_groups(self, sp_size: int, timeout: timedelta) -> None:
        """Create our groups in one order on every rank; `timeout` is for each operation on them."""
        self.sp_size = sp_size
        self.replica = self._topo.get_coord(self.global_rank).replica
        self.sequence_ranks = next(r for r in self.dp_groups if self.global_rank in r)
        self.sequence_pg = self._join(self.dp_groups, timeout)
        self._add_pipe_groups(timeout)
        self._add_replica_groups(timeout)
        # DeepSpeed reduces norm and overflow over all ranks of one 'data' index, which would count
        # every replica; each pipeline column is what it means
        self.ds_model_proc_group = self.pp_proc_group
        self.ds_model_world_size = len(self.pp_group)
        self.ds_model_rank = self.pp_group.index(self.global_rank)

    def _add_pipe_groups(self, timeout: timedelta) -> None:
        self.activations_in_pg = self.activations_out_pg = None
        self.gradients_in_pg = self.gradients_out_pg = None
        stage = self.get_stage_id()
        for parity in range(2):  # edges of one parity share no stage
            edges = [
                edge
                for ranks in self.pipe_groups
                for number, edge in enumerate(pairwise(ranks))
                if number % 2 == parity
            ]
            activations, gradients = (self._join(edges, timeout) for _ in range(2))
            if stage % 2 == parity:
                self.activations_out_pg, self.gradients_in_pg = activations, gradients
            else:
                self.activations_in_pg, self.gradients_out_pg = activations, gradients
        self.tied_pg = self._join(
            [sorted({ranks[0], ranks[-1]}) for ranks in self.pipe_groups], timeout
        )

    def _add_replica_groups(self, timeout: timedelta) -> None:
        topology, replicas = self._topo, self._topo.get_dim("replica")
        self.replica_pg = self._join(topology.get_axis_comm_lists("replica"), timeout)
        stages = [topology.get_axis_list("pipe", p) for p in range(topology.get_dim("pipe"))]
        self.gradient_pg = self._join(stages, timeout)
        self.control_pg = torch_dist.new_group(timeout=timeout, backend="gloo")
        self.plan_pg, self.plan_rank = self.control_pg, 0
        for replica in range(replicas if replicas > 1 else 0):
            ranks = topology.get_axis_list("replica", replica)
            pg = torch_dist.new_group(ranks=ranks, timeout=timeout, backend="gloo")
            if self.global_rank in ranks:
                self.plan_pg, self.plan_rank = pg, min(ranks)

    def _join(self, parts: Sequence[Sequence[int]], timeout: timedelta) -> Any:
        """This rank's group of `parts`, which share no rank; None where it is alone or in none.

        Every group is a split of all ranks, which NCCL takes at once.
        """
        parts = [list(ranks) for ranks in parts if len(ranks) > 1]
        world: Any = dist.get_world_group()
        if parts and torch_dist.get_backend() == "nccl" and world.bound_device_id is not None:
            pg = torch_dist.split_group(world, parts, timeout=timeout)
            return pg if any(self.global_rank in ranks for ranks in parts) else None
        own = None
        for ranks in parts:
            pg = torch_dist.new_group(ranks=ranks, timeout=timeout)
            own = pg if self.global_rank in ranks else own
        return own

    def get_sequence_parallel_group(self) -> Any:
        return self.dp_proc_group if self.sequence_pg is None else self.sequence_pg

    def get_sequence_parallel_world_size(self) -> int:
        return self.sp_size

    def get_sequence_parallel_rank(self) -> int:
        return self.sequence_ranks.index(self.global_rank)

    def get_sequence_data_parallel_group(self) -> Any:
        return self.dp_proc_group

    def get_sequence_data_parallel_world_size(self) -> int:
        return int(self.data_parallel_size)

    def get_sequence_data_parallel_rank(self) -> int:
        return int(self.data_parallel_id)

    def peer(self, stage: int) -> int:
        """Global rank that holds this rank's tokens at another stage."""
        return int(self.stage_to_global(stage))


def adopt_grid(grid: Any, sp_size: int, timeout: timedelta) -> InfiniPipeGrid:
    """Turn the grid PipelineModule built for itself into ours; it offers no way to pass one."""
    grid.__class__ = InfiniPipeGrid
    assert isinstance(grid, InfiniPipeGrid)
    grid.add_groups(sp_size, timeout)
    for pg in (grid.dp_proc_group, grid.pp_proc_group):
        _set_timeout(pg, timeout)
    _set_timeout(dist.get_world_group(), timeout)
    return grid


def _set_timeout(pg: Any, timeout: timedelta) -> None:
    # DeepSpeed creates its groups with torch's default of 30 minutes; others have a limit or none
    if torch_dist.get_backend(pg) in ("gloo", "nccl"):
        torch_dist.distributed_c10d._set_pg_timeout(timeout, pg)
