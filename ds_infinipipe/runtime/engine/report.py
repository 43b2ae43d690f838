"""What one step did, against what was predicted.

What the ranks measured comes together by one all-reduce; the figures go to the log, and to
DeepSpeed's monitor: TensorBoard, CSV files, Weights & Biases, Comet.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from deepspeed import comm as dist

from ds_infinipipe.planner.plan.chunks import ChunkKind
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.predict.time import step_flops
from ds_infinipipe.runtime.engine.planning import PlanningReport
from ds_infinipipe.runtime.ranks.clock import Wait
from ds_infinipipe.runtime.ranks.faults import naming_peer_failures
from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.stage.batch import StepBatch

__all__ = [
    "RankFigures",
    "StageMemory",
    "StepReport",
    "StepTotals",
    "TimeCalibration",
    "step_events",
    "utilisation",
]

_PREFIX = "Train/InfiniPipe"


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of a stage's fullest rank; `measured` is 0 where nothing counted."""

    measured: int
    predicted: int


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured in a step."""

    loss: float
    busy_s: float
    waits_s: Mapping[Wait, float]
    recomputed_layers: int
    wants_stop: bool
    memory: StageMemory


@dataclass(frozen=True)
class StepTotals:
    """Sums over all `ranks`; seconds are rank-seconds."""

    ranks: int
    loss: float
    busy_s: float
    waits_s: Mapping[Wait, float]
    recomputed_layers: int
    """Counted once per stage and replica."""
    wants_stop: bool
    memory: tuple[StageMemory, ...]
    """By stage."""

    @classmethod
    def gather(cls, rank: Rank, figures: RankFigures, step: int) -> StepTotals:
        """Every rank's figures of a step; a collective over all ranks."""
        mine = [
            figures.loss,
            figures.busy_s,
            float(figures.recomputed_layers),
            float(figures.wants_stop),
            *(figures.waits_s[kind] for kind in Wait),
        ]
        # a place for every rank, so that the sum keeps their bytes apart
        places = torch.zeros(2, rank.num_stages, rank.dp_size * rank.sp_size, dtype=torch.float64)
        peaks = (figures.memory.measured, figures.memory.predicted)
        column = rank.replica * rank.sp_size + rank.sp_rank
        places[:, rank.stage, column] = torch.tensor(peaks, dtype=torch.float64)
        together = torch.cat([torch.tensor(mine, dtype=torch.float64), places.flatten()])
        together = together.to(rank.device)
        with naming_peer_failures(f"summing the loss of step {step}"):
            dist.all_reduce(together)
        loss, busy_s, recomputed, stops, *rest = together.tolist()
        placed = torch.tensor(rest[len(Wait) :], dtype=torch.float64).reshape(places.shape)
        highest = placed.amax(dim=2).long().tolist()
        return cls(
            ranks=rank.world_size,
            loss=loss,
            busy_s=busy_s,
            waits_s=dict(zip(Wait, rest, strict=False)),
            recomputed_layers=round(recomputed / rank.sp_size),
            wants_stop=stops > 0,
            memory=tuple(StageMemory(*pair) for pair in zip(*highest, strict=True)),
        )


class TimeCalibration:
    """Ratio of measured to simulated step time over the last steps.

    It corrects what is reported, never what is planned, so plans stay reproducible.
    """

    def __init__(self, window: int = 8) -> None:
        self._ratios: deque[float] = deque(maxlen=window)

    @property
    def factor(self) -> float:
        """Median ratio; 1 before the first measurement."""
        return statistics.median(self._ratios) if self._ratios else 1.0

    def add(self, predicted_s: float, measured_s: float) -> None:
        """Note one step."""
        if predicted_s > 0:
            self._ratios.append(measured_s / predicted_s)


@dataclass(frozen=True)
class StepReport:
    """Figures of one optimizer step; times in seconds, ratios from 0 to 1."""

    step: int
    loss: float
    grad_norm: float
    tokens: int
    padding_tokens: int
    sequences: int
    without_label: int
    chunks: dict[str, int]
    pipelines: int
    recomputed_layers: int
    elapsed_s: float
    simulated_s: float
    predicted_s: float
    bubble_ratio: float
    predicted_bubble_ratio: float
    solve_s: float
    planning_wait_s: float
    planning_fallback: bool
    planning_ahead: bool
    memory_limit_gib: float = 0.0
    waits: Mapping[Wait, float] = field(default_factory=dict)
    """Shares of the rank-seconds in which compute stood still for communication. Transfers, which
    also wait while a neighbour computes, are part of the bubbles; the others are not."""
    memory: tuple[StageMemory, ...] = ()
    """Peak bytes by stage, up to the optimizer's step, as predictions are."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s

    @property
    def exposed_communication(self) -> float:
        """Share of the rank-seconds spent waiting for communication of any kind."""
        return sum(self.waits.values())

    @property
    def measured_memory(self) -> StageMemory | None:
        """That of the stage with the highest measured peak; None where nothing was measured."""
        fullest = max(self.memory, key=lambda stage: stage.measured, default=None)
        return fullest if fullest is not None and fullest.measured else None

    @classmethod
    def build(
        cls,
        *,
        step: int,
        totals: StepTotals,
        grad_norm: float,
        plan: Plan,
        batch: StepBatch,
        planning: PlanningReport | None,
        elapsed_s: float,
        calibration: float,
    ) -> StepReport:
        """What the ranks did not compute of the step's time is bubble."""
        rank_s = totals.ranks * elapsed_s
        kinds = Counter(chunk.kind for chunk in plan.chunks)
        planning = planning or PlanningReport(plan.solver.time_s, 0.0)
        return cls(
            step=step,
            loss=totals.loss,
            grad_norm=grad_norm,
            tokens=batch.num_tokens,
            padding_tokens=plan.padding_tokens,
            sequences=len(batch.ids),
            without_label=batch.num_without_label,
            chunks={kind.value: kinds[kind] for kind in ChunkKind},
            pipelines=len(plan.pipelines),
            recomputed_layers=totals.recomputed_layers,
            elapsed_s=elapsed_s,
            simulated_s=plan.predicted.step_time_s,
            predicted_s=plan.predicted.step_time_s * calibration,
            bubble_ratio=1.0 - totals.busy_s / rank_s,
            predicted_bubble_ratio=plan.predicted.bubble_ratio,
            solve_s=planning.solve_s,
            planning_wait_s=planning.waited_s,
            planning_fallback=planning.is_fallback,
            planning_ahead=planning.was_ahead,
            memory_limit_gib=plan.setup.limit_bytes / 2**30,
            waits={kind: wait_s / rank_s for kind, wait_s in totals.waits_s.items()},
            memory=totals.memory,
        )

    def line(self) -> str:
        """One log line."""
        num_chunks = sum(self.chunks.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.chunks.items())
        return (
            f"step {self.step} | loss {self.loss:.4f} | grad norm {self.grad_norm:.3f} | "
            f"{self.tokens_per_s:,.0f} tokens/s | {self.sequences} sequences, {self.tokens:,} "
            f"tokens, {self.padding_tokens} padding{self._left_out()} | "
            f"{num_chunks} chunk{'s' if num_chunks != 1 else ''} ({kinds}) in {self.pipelines} "
            f"pipeline{'s' if self.pipelines != 1 else ''} | "
            f"{self.recomputed_layers} layers recomputed | {self.elapsed_s:.2f} s (predicted "
            f"{self.predicted_s:.2f}) | bubble {self.bubble_ratio:.0%} (predicted "
            f"{self.predicted_bubble_ratio:.0%}), exposed communication "
            f"{self.exposed_communication:.0%}{self._peak()} | {self._planning()}"
        )

    def _left_out(self) -> str:
        return f", {self.without_label} left out without a label" if self.without_label else ""

    def _peak(self) -> str:
        memory = self.measured_memory
        if memory is None:
            return ""
        measured, predicted = (n / 2**30 for n in (memory.measured, memory.predicted))
        return f" | peak {measured:.4g} GiB (predicted {predicted:.4g})"

    def _planning(self) -> str:
        if self.planning_fallback:
            return f"plan late, fallback after {self.planning_wait_s:.2f} s"
        if not self.planning_ahead:
            return f"planned in {self.solve_s:.2f} s, not ahead"
        # unpacking and handing out a plan takes milliseconds, which nobody would call waiting
        hidden = self.planning_wait_s < max(0.05, 0.02 * self.elapsed_s)
        state = "hidden" if hidden else f"waited {self.planning_wait_s:.2f} s"
        return f"planned in {self.solve_s:.2f} s, {state}"


def utilisation(plan: Plan, elapsed_s: float) -> tuple[float, float]:
    """Share of the devices' peak that the step used: for the model alone, and with recompute.

    The peak is the cluster description's, so these are as true as it is.
    """
    flops = step_flops(plan)
    # a plan is one replica's; the others do as much work on as many devices
    peak = plan.cluster.peak_flops * plan.layout.pp * plan.layout.sp * elapsed_s
    return flops.model / peak, (flops.model + flops.recompute) / peak


def step_events(
    report: StepReport,
    plan: Plan,
    num_samples: int,
    counters: Mapping[str, float],
) -> list[tuple[str, float, int]]:
    """(tag, value, samples) for `monitor.write_events`; `counters` are the engine's, by tag."""
    model_share, hardware_share = utilisation(plan, report.elapsed_s)
    chunks = sum(report.chunks.values())
    decoder_passes = max(1, plan.model.num_layers * chunks)
    values = {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "tokens_per_s": report.tokens_per_s,
        "tokens": report.tokens,
        "sequences": report.sequences,
        "chunks": chunks,
        "pipelines": report.pipelines,
        "padding_share": report.padding_tokens / max(1, report.tokens),
        "recompute_share": report.recomputed_layers / decoder_passes,
        "model_flops_utilisation": model_share,
        "hardware_flops_utilisation": hardware_share,
        "step_time_s": report.elapsed_s,
        "predicted_step_time_s": report.predicted_s,
        "bubble_ratio": report.bubble_ratio,
        "predicted_bubble_ratio": report.predicted_bubble_ratio,
        "planning_s": report.solve_s,
        "planning_wait_s": report.planning_wait_s,
        "exposed_communication": report.exposed_communication,
        **{f"exposed_{kind.value}": share for kind, share in report.waits.items()},
        "predicted_peak_gib": max(stage.predicted for stage in report.memory) / 2**30,
        "memory_limit_gib": report.memory_limit_gib,
        **counters,
    }
    measured = [stage for stage in report.memory if stage.measured]
    if measured:
        values["peak_gib"] = max(stage.measured for stage in measured) / 2**30
        values["peak_over_predicted"] = max(s.measured / s.predicted for s in measured)
    return [(f"{_PREFIX}/{name}", float(value), num_samples) for name, value in values.items()]
