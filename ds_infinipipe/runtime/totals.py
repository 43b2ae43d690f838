"""What the ranks measured in a step, brought together by one all-reduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from deepspeed import comm as dist

from ds_infinipipe.runtime.faults import naming_peer_failures
from ds_infinipipe.runtime.waits import Wait

if TYPE_CHECKING:
    from ds_infinipipe.planner.types import Timeline
    from ds_infinipipe.runtime.engine import InfiniPipeEngine

__all__ = ["StageMemory", "StepTotals"]


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of a stage's fullest rank; `measured` is 0 where nothing counted."""

    measured: int
    predicted: int


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks; seconds are rank-seconds."""

    loss: float
    busy_s: float
    waits_s: Mapping[Wait, float]
    recomputed_layers: int
    """Counted once per stage and replica."""
    wants_stop: bool
    memory: tuple[StageMemory, ...]
    """By stage."""

    @classmethod
    def gather(
        cls, engine: InfiniPipeEngine, timeline: Timeline, measured_bytes: int, wants_stop: bool
    ) -> StepTotals:
        """Every rank's figures; a collective over all ranks that waits for the device."""
        assert engine.plan is not None
        waits_s, pp = engine.waits.seconds(), engine.num_stages
        mine = [
            engine.executor.loss_sum,
            timeline.busy_s[0],
            float(engine.executor.recomputed_layers),
            float(wants_stop),
            *(waits_s[kind] for kind in Wait),
        ]
        # a place for every rank, so that the sum keeps their bytes apart
        places = torch.zeros(2, pp, dist.get_world_size() // pp, dtype=torch.float64)
        column = engine.grid.replica * engine.sp_size + engine.sp_rank
        predicted_bytes = engine.plan.predicted.peak_bytes[engine.stage_id]
        places[:, engine.stage_id, column] = torch.tensor(
            [measured_bytes, predicted_bytes], dtype=torch.float64
        )
        together = torch.cat([torch.tensor(mine, dtype=torch.float64), places.flatten()])
        together = together.to(engine.device)
        with naming_peer_failures(f"summing the loss of step {engine.global_steps}"):
            dist.all_reduce(together)
        loss, busy_s, recomputed, stops, *rest = together.tolist()
        ranks = torch.tensor(rest[len(Wait) :], dtype=torch.float64).reshape(places.shape)
        peaks = ranks.amax(dim=2).long().tolist()
        return cls(
            loss=loss,
            busy_s=busy_s,
            waits_s=dict(zip(Wait, rest, strict=False)),
            recomputed_layers=round(recomputed / engine.sp_size),
            wants_stop=stops > 0,
            memory=tuple(StageMemory(*pair) for pair in zip(*peaks, strict=True)),
        )
