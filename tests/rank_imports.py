"""Loaded once by the fork server of `ranks.py`: all that ranks import, so that they start with it.

Loading it must start no thread, which a fork would lose.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil

import deepspeed.utils.nvtx
import pytest  # noqa: F401  test functions are found by importing their module

import ds_infinipipe

# What an engine's first build imports by itself.
_LATE = [
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_presets",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]


def _load() -> None:
    for name in _LATE:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(ds_infinipipe.__path__, "ds_infinipipe."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


_load()
# Ranges for Nvidia's profiler at every small call of ZeRO's: no test reads them.
deepspeed.utils.nvtx.enable_nvtx = False
# The path that led here was for this process only; the ranks get the one that was there before.
os.environ["PYTHONPATH"] = os.environ.pop("RANKS_PYTHONPATH", "")
# The collector leaves these objects alone from here on. DeepSpeed collects whenever it builds an
# engine: it would walk through all of them, and copy the pages they lie in for every rank.
gc.collect()
gc.freeze()
