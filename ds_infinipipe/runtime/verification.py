"""`infinipipe verify`: the exactness check on local ranks, as a table."""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections.abc import Sequence

from ds_infinipipe.runtime.local_ranks import run_local_ranks
from ds_infinipipe.runtime.selftest import (
    FLOAT32_LIMIT,
    FLOAT64_LIMIT,
    Case,
    StepDifference,
    compare_steps,
)

__all__ = ["main"]


def main(args: argparse.Namespace) -> int:
    """`infinipipe verify`: start local ranks, compare, print a table; 1 if anything is off.

    `args` has `pp`, `sp`, `steps` and `seed`.
    """
    cases = [
        Case(
            model_type=kind,
            pp=args.pp,
            sp=args.sp,
            zero_stage=zero_stage,
            float64=zero_stage == 0,
            tied=kind == "qwen2",
            num_layers=max(4, args.pp),
            num_heads=math.lcm(4, args.sp),
            num_kv_heads=math.lcm(2, args.sp),
            steps=args.steps,
            seed=args.seed,
        )
        for kind in ("llama", "qwen2", "qwen3")
        for zero_stage in (0, 3)
    ]
    by_rank = run_local_ranks(_compare_cases, args.pp * args.sp, cases)
    rows = [[d for rank in by_rank for d in rank[index]] for index in range(len(cases))]
    print(_table(cases, rows))
    failed = [c for c, r in zip(cases, rows, strict=True) if not _is_exact(c, r)]
    print(f"{len(cases) - len(failed)} of {len(cases)} comparisons hold")
    return 1 if failed else 0


def _compare_cases(cases: Sequence[Case]) -> list[list[StepDifference]]:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    return [compare_steps(case) for case in cases]


def _is_exact(case: Case, differences: Sequence[StepDifference]) -> bool:
    limit = FLOAT64_LIMIT if case.float64 else FLOAT32_LIMIT
    return all(max(d.loss_error, d.gradient_error, d.norm_error) <= limit for d in differences)


def _table(cases: Sequence[Case], rows: Sequence[Sequence[StepDifference]]) -> str:
    lines = [
        "model       layout  precision       steps  loss diff  gradient diff  norm diff  chunks"
    ]
    for case, differences in zip(cases, rows, strict=True):
        kind = f"{case.model_type}{' tied' if case.tied else ''}"
        precision = "float64, ZeRO-0" if case.float64 else "float32, ZeRO-3"
        loss, gradient, norm = (
            max(getattr(d, name) for d in differences)
            for name in ("loss_error", "gradient_error", "norm_error")
        )
        chunks = sum(d.chunks for d in differences[: case.steps])
        lines.append(
            f"{kind:11s} {case.pp}x{case.sp:<5d} {precision}  {case.steps:5d}  {loss:9.1e}  "
            f"{gradient:13.1e}  {norm:9.1e}  {chunks:6d}"
        )
    return "\n".join(lines)
