"""Which stage recomputes how many layers of which chunk."""

from __future__ import annotations

from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.plan.stream import Op

__all__ = ["recompute_map", "recompute_text"]

_WIDTH = 100
_HEAD = "stage 000"


def recompute_map(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """`result[stage][chunk]` recomputed layers, read from the streams."""
    table = [[0] * len(plan.chunks) for _ in range(plan.layout.pp)]
    for stage, stream in enumerate(plan.streams):
        for instruction in stream:
            if instruction.op is Op.FORWARD:
                table[stage][instruction.chunk] = instruction.recompute
    return tuple(tuple(row) for row in table)


def recompute_text(plan: Plan) -> str:
    """The map as text: a row a stage, a column a chunk in forward order, "." for none."""
    table = recompute_map(plan)
    if not any(map(any, table)):
        return "recompute  no layer of any chunk is recomputed"
    lines = ["recompute  layers by stage and chunk, chunks in forward order; . is none"]
    for number, pipeline in enumerate(plan.pipelines):
        if len(plan.pipelines) > 1:
            lines.append(f"pipeline {number}")
        numbers = [*pipeline.forward, *(row[chunk] for row in table for chunk in pipeline.forward)]
        width = 1 + len(str(max(numbers)))
        per_line = (_WIDTH - len(_HEAD)) // width
        for first in range(0, len(pipeline.forward), per_line):
            columns = pipeline.forward[first : first + per_line]
            lines.append(_row("chunk", [str(chunk) for chunk in columns], width))
            for stage, counts in enumerate(table):
                cells = [str(counts[chunk] or ".") for chunk in columns]
                lines.append(_row(f"stage {stage}", cells, width))
    return "\n".join(lines)


def _row(head: str, cells: list[str], width: int) -> str:
    return f"{head:<{len(_HEAD)}}" + "".join(f"{cell:>{width}}" for cell in cells)
