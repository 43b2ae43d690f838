"""Where one rank stands among the others, and what it computes with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_infinipipe.runtime.ranks.grid import InfiniPipeGrid

__all__ = ["Rank"]


@dataclass(frozen=True)
class Rank:
    """Facts that do not change while an engine lives; all ranks are global, counted from 0.

    `stage_ranks` are the sequence-parallel ranks of the stage in this replica, in their order,
    `neighbours` the ranks that hold the same tokens at the stages before and behind, and
    `plan_rank` is the one that plans for the replica.
    """

    global_rank: int
    world_size: int
    stage: int
    num_stages: int
    sp_rank: int
    sp_size: int
    replica: int
    dp_size: int
    stage_ranks: tuple[int, ...]
    neighbours: tuple[int, ...]
    plan_rank: int
    device: torch.device
    dtype: torch.dtype
    """What activations and gradients between stages are in."""

    @classmethod
    def on_grid(cls, grid: InfiniPipeGrid, device: torch.device, dtype: torch.dtype) -> Rank:
        """The rank of this process."""
        stage, num_stages = grid.get_stage_id(), grid.get_pipe_parallel_world_size()
        beside = [s for s in (stage - 1, stage + 1) if 0 <= s < num_stages]
        return cls(
            global_rank=grid.global_rank,
            world_size=grid.world_size,
            stage=stage,
            num_stages=num_stages,
            sp_rank=grid.get_sequence_parallel_rank(),
            sp_size=grid.sp_size,
            replica=grid.replica,
            dp_size=grid.world_size // (num_stages * grid.sp_size),
            stage_ranks=tuple(grid.sequence_ranks),
            neighbours=tuple(grid.peer(s) for s in beside),
            plan_rank=grid.plan_rank,
            device=device,
            dtype=dtype,
        )

    @property
    def is_first(self) -> bool:
        """True for the one rank that speaks and writes for all."""
        return self.global_rank == 0

    @property
    def is_planner(self) -> bool:
        """True for the one rank that plans and writes for its replica."""
        return self.global_rank == self.plan_rank

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1
