"""A step's figures for DeepSpeed's monitor: TensorBoard, CSV files, Weights & Biases, Comet."""

from __future__ import annotations

from collections.abc import Mapping

from ds_infinipipe.planner.flops import step_flops
from ds_infinipipe.planner.types import Plan
from ds_infinipipe.runtime.report import StepReport

__all__ = ["step_events", "utilisation"]

_PREFIX = "Train/InfiniPipe"


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
        "out_of_memory_repeats": report.repeats,
        **counters,
    }
    measured = [stage for stage in report.memory if stage.measured]
    if measured:
        values["peak_gib"] = max(stage.measured for stage in measured) / 2**30
        values["peak_over_predicted"] = max(s.measured / s.predicted for s in measured)
    return [(f"{_PREFIX}/{name}", float(value), num_samples) for name, value in values.items()]
