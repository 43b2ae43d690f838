"""What one step did, against what was predicted."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_infinipipe.planner.types import ChunkKind, Plan
from ds_infinipipe.runtime.batch import StepBatch
from ds_infinipipe.runtime.planning import PlanningReport
from ds_infinipipe.runtime.totals import StageMemory, StepTotals
from ds_infinipipe.runtime.waits import Wait

__all__ = ["StepReport", "TimeCalibration"]


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
    repeats: int = 0
    """How often the step was started again because a rank ran out of memory."""
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
        rank_s: float,
        calibration: float,
        repeats: int = 0,
    ) -> StepReport:
        """`rank_s` is the step's time times the ranks; what they did not compute is bubble."""
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
            memory_limit_gib=plan.memory_limit_bytes / 2**30,
            repeats=repeats,
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
            f"{self.exposed_communication:.0%}{self._peak()} | {self._planning()}{self._repeats()}"
        )

    def _left_out(self) -> str:
        return f", {self.without_label} left out without a label" if self.without_label else ""

    def _peak(self) -> str:
        memory = self.measured_memory
        if memory is None:
            return ""
        measured, predicted = (n / 2**30 for n in (memory.measured, memory.predicted))
        return f" | peak {measured:.4g} GiB (predicted {predicted:.4g})"

    def _repeats(self) -> str:
        if not self.repeats:
            return ""
        times = "once" if self.repeats == 1 else f"{self.repeats} times"
        return f" | out of memory {times}, then planned within {self.memory_limit_gib:.4g} GiB"

    def _planning(self) -> str:
        if self.planning_fallback:
            return f"plan late, fallback after {self.planning_wait_s:.2f} s"
        if not self.planning_ahead:
            return f"planned in {self.solve_s:.2f} s, not ahead"
        # unpacking and handing out a plan takes milliseconds, which nobody would call waiting
        hidden = self.planning_wait_s < max(0.05, 0.02 * self.elapsed_s)
        state = "hidden" if hidden else f"waited {self.planning_wait_s:.2f} s"
        return f"planned in {self.solve_s:.2f} s, {state}"
