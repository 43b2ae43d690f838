"""Start a function on several ranks of this machine, without a launcher."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["run_local_ranks"]


def run_local_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Results of `function(*args)` by rank; the function must be importable by name.

    A rank that fails ends the others, and torch's ChildFailedError names it.
    """
    start_method = "spawn"
    if not torch.cuda.is_available():
        # ranks are forked from one process that has imported what they need; where GPUs are, that
        # import looks for them, after which forked processes cannot use them
        start_method = "forkserver"
        multiprocessing.set_forkserver_preload([function.__module__])
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method=start_method,
    )
    # ranks that share the cores of one machine would otherwise start as many threads each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = elastic_launch(launch, function)(*args)
    return [results[rank] for rank in range(num_ranks)]
