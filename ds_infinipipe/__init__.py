"""Elastic pipeline parallelism for DeepSpeed.

Importing the package imports nothing else: the planner and its workers stay free of torch, and
`python -m ds_infinipipe plan` starts at once. Public names load their module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "initialize": "ds_infinipipe.runtime.engine.initialize",
    "InfiniPipeModule": "ds_infinipipe.runtime.engine.module",
    "InfiniPipeEngine": "ds_infinipipe.runtime.engine.engine",
    "OwnLayers": "ds_infinipipe.model.protocol",
    "InfiniPipeConfig": "ds_infinipipe.config.section",
    "ChunkSampler": "ds_infinipipe.data.sampler",
    "DocumentDataset": "ds_infinipipe.data.dataset",
    "plan_batch": "ds_infinipipe.planner.search.batch",
    "PlannerSettings": "ds_infinipipe.planner.facts.settings",
    "ClusterSpec": "ds_infinipipe.planner.facts.clusters",
    "Execution": "ds_infinipipe.planner.facts.setup",
    "Layout": "ds_infinipipe.planner.facts.setup",
    "Setup": "ds_infinipipe.planner.facts.setup",
    "ModelSpec": "ds_infinipipe.planner.facts.models",
    "load_cluster": "ds_infinipipe.planner.facts.clusters",
    "load_model": "ds_infinipipe.planner.facts.models",
    "make_layout": "ds_infinipipe.planner.facts.setup",
    "make_setup": "ds_infinipipe.planner.facts.setup",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
