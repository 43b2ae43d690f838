"""What other systems would take for the same batch, in the planner's own simulator.

Pipeline baselines differ from our plans in chunks, schedule and checkpointing only; DeepSpeed,
FlexSP and Megatron-LM have closed models of their own, whose docstrings say what is coarse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ds_infinipipe.baselines.ablations import (
    full_checkpointing,
    ours,
    without_balanced_chunking,
    without_checkpointing,
)
from ds_infinipipe.baselines.dapple import dapple
from ds_infinipipe.baselines.deepspeed import deepspeed
from ds_infinipipe.baselines.flexsp import flexsp
from ds_infinipipe.baselines.gpipe import gpipe
from ds_infinipipe.baselines.megatron import megatron
from ds_infinipipe.baselines.result import BaselineResult, Workload
from ds_infinipipe.baselines.seq1f1b import seq1f1b
from ds_infinipipe.errors import DataError

__all__ = ["BASELINES", "BaselineResult", "Workload", "compare"]

BASELINES: Mapping[str, Callable[[Workload], Sequence[BaselineResult]]] = {
    "ours": ours,
    "seq1f1b": seq1f1b,
    "dapple": dapple,
    "gpipe": gpipe,
    "deepspeed": deepspeed,
    "flexsp": flexsp,
    "megatron": megatron,
    "without-balanced-chunking": without_balanced_chunking,
    "without-checkpointing": without_checkpointing,
    "full-checkpointing": full_checkpointing,
}


def compare(
    workload: Workload, names: Sequence[str] = tuple(BASELINES)
) -> tuple[BaselineResult, ...]:
    """Results of the named systems in the order of the table; DataError for an empty batch."""
    if not workload.lengths:
        raise DataError("the batch is empty: a comparison needs at least one sequence")
    return tuple(
        result for name in BASELINES if name in names for result in BASELINES[name](workload)
    )
