"""Operations of a stage, one after the other: what `build_schedule` does for all stages."""

from __future__ import annotations

from collections.abc import Sequence

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.planner.plan.order import window_size
from ds_infinipipe.planner.plan.plan import PipelinePlan
from ds_infinipipe.planner.plan.stream import Op

__all__ = ["pipeline_operations", "stage_operations"]


def stage_operations(
    forward: Sequence[int], backward: Sequence[int], window: int | Sequence[int]
) -> tuple[tuple[Op, int], ...]:
    """F and B of one stage: before the j-th backward, forwards up to j + window have run.

    `window` is one number or one per backward. Raises ScheduleError when a window is so small that
    a backward would precede its forward.
    """
    operations: list[tuple[Op, int]] = []
    issued: set[int] = set()
    windows = [window] * len(backward) if isinstance(window, int) else window
    for position, (chunk, size) in enumerate(zip(backward, windows, strict=True)):
        for ahead in forward[len(issued) : position + size]:
            operations.append((Op.FORWARD, ahead))
            issued.add(ahead)
        if chunk not in issued:
            raise ScheduleError(
                f"a window of {size} chunks reaches B{chunk} before F{chunk}: "
                "the window must hold every slice of a sequence"
            )
        operations.append((Op.BACKWARD, chunk))
    return tuple(operations)


def pipeline_operations(
    pipelines: Sequence[PipelinePlan], pp: int
) -> tuple[tuple[tuple[Op, int], ...], ...]:
    """F and B of every stage for 1F1B pipelines that run one after the other (windows of Eq. 7).

    Their gradients accumulate into one optimizer step.
    """
    return tuple(
        tuple(
            operation
            for p in pipelines
            for operation in stage_operations(
                p.forward, p.backward, window_size(pp, stage, p.num_split)
            )
        )
        for stage in range(pp)
    )
