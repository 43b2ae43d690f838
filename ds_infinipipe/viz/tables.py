"""Text tables of plans, for people."""

from __future__ import annotations

from collections import Counter
from statistics import median

from ds_infinipipe.planner.facts.setup import Execution
from ds_infinipipe.planner.plan.chunks import ChunkKind
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op

__all__ = ["kernels_note", "plan_summary"]

_GIB = 2**30
_RANKS_AT_WILL = "cpu-local"  # its devices are processes


def plan_summary(plan: Plan) -> str:
    """Summary of a plan: chunks by kind, pipelines, each stage's memory and recompute, forecast."""
    return "\n".join(
        [
            _batch_line(plan),
            _chunks_line(plan),
            *_pipeline_lines(plan),
            *_idle_line(plan),
            f"memory     {kernels_note(plan.setup.execution)}",
            *_gather_line(plan),
            "",
            *_stage_table(plan),
            "",
            _forecast_line(plan),
            _solver_line(plan),
            f"digest     {plan.digest()[:16]}",
        ]
    )


def kernels_note(execution: Execution) -> str:
    """Which layers' saved activations the predicted memory is for."""
    if execution.fused_kernels:
        return (
            "with the activations of fused kernels; training here keeps more, those of plain layers"
        )
    return "with the activations of plain Hugging Face layers, what training here keeps"


def _gather_line(plan: Plan) -> list[str]:
    if not plan.setup.gathers_parameters:
        return []
    when = "once a step, and kept" if plan.setup.execution.keeps_gathered else "for every chunk"
    return [f"gathers    parameters {when}"]


def _idle_line(plan: Plan) -> list[str]:
    used, there = plan.layout.world_size, plan.cluster.num_devices
    if used >= there or plan.cluster.name == _RANKS_AT_WILL:
        return []
    return [f"devices    {used} of {there} of {plan.cluster.name}: {there - used} stay idle"]


def _batch_line(plan: Plan) -> str:
    layout = plan.layout
    degrees = f"pp {layout.pp}, sp {layout.sp}" + (f", dp {layout.dp}" if layout.dp > 1 else "")
    return (
        f"batch      {_count(len(plan.lengths), 'sequence')}, {plan.num_tokens:,} tokens, longest "
        f"{max(plan.lengths, default=0):,}; {plan.model.name} on {plan.cluster.name}, {degrees}"
    )


def _chunks_line(plan: Plan) -> str:
    kinds = Counter(chunk.kind for chunk in plan.chunks)
    by_kind = ", ".join(f"{kinds[kind]} {kind.value}" for kind in ChunkKind)
    tokens = sorted(chunk.padded_tokens for chunk in plan.chunks) or [0]
    share = plan.padding_tokens / max(1, plan.num_tokens + plan.padding_tokens)
    return (
        f"chunks     {len(plan.chunks)}: {by_kind}; {tokens[0]:,} to {tokens[-1]:,} tokens, median "
        f"{round(median(tokens)):,}; {_count(plan.padding_tokens, 'token')} of padding "
        f"({share:.2%})"
    )


def _pipeline_lines(plan: Plan) -> list[str]:
    lines = [f"pipelines  {len(plan.pipelines)}"]
    for number, pipeline in enumerate(plan.pipelines):
        tokens = sum(plan.chunks[chunk].tokens for chunk in pipeline.forward)
        lines.append(
            f"  {number:>7}  {_count(len(pipeline.forward), 'chunk')}, {tokens:,} tokens, at most "
            f"{_count(pipeline.num_split, 'slice')} a sequence"
        )
    return lines


def _stage_table(plan: Plan) -> list[str]:
    limit_gib = plan.setup.limit_bytes / _GIB
    lines = ["stage  layers   peak GiB  limit GiB   used  recomputed layers (of all forwards')"]
    for stage, layers in enumerate(plan.layout.stage_layers):
        forwards = [i for i in plan.streams[stage] if i.op is Op.FORWARD]
        recomputed, possible = sum(i.recompute for i in forwards), layers * len(forwards)
        peak = plan.predicted.peak_bytes[stage]
        lines.append(
            f"{stage:>5}  {layers:>6}  {peak / _GIB:>9.2f}  {limit_gib:>9.2f}  "
            f"{peak / plan.setup.limit_bytes:>5.0%}  "
            f"{recomputed} of {possible} ({recomputed / max(1, possible):.1%})"
        )
    return lines


def _forecast_line(plan: Plan) -> str:
    step_time_s = plan.predicted.step_time_s
    rate = f", {plan.num_tokens / step_time_s:,.0f} tokens/s" if step_time_s > 0 else ""
    return f"predicted  {step_time_s:.4g} s a step{rate}, bubbles {plan.predicted.bubble_ratio:.1%}"


def _solver_line(plan: Plan) -> str:
    solver = plan.solver
    note = f"; {solver.note}" if solver.note else ""
    return (
        f"solver     {solver.mode} mode, K = {solver.k}, {solver.status} (gap {solver.gap:.1%}), "
        f"{solver.time_s:.2f} s{note}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
