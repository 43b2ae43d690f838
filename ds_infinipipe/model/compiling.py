"""torch.compile of decoder layers, for chunks of any number of tokens.

Attention stays outside: it reads arenas, exchanges heads between ranks and runs kernels of its own.
So a layer becomes the graph before it and the graph after it, which all layers of a stage share.
Parameters are inputs of the graphs and are gathered and released around them as ever.
"""

from __future__ import annotations

import shutil

import torch
from torch import nn

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.hf import keep_attention_outside_graphs
from ds_infinipipe.ops.triton_support import triton_obstacle

__all__ = ["check_compiling", "compile_block"]

_COMPILERS = ("g++", "clang++", "c++")


def compile_block(block: nn.Module, backend: str = "inductor") -> None:
    """Let the block's calls run compiled; its parameters, their names and its state stay as is.

    Token counts are symbols in the graphs: there is one set of graphs for 1 token and one for
    more, each with and without gradients.
    """
    keep_attention_outside_graphs()
    block.compile(backend=backend, dynamic=True)


def check_compiling(device: torch.device) -> None:
    """Raises ConfigError where what turns graphs into code is missing."""
    obstacle = None
    if device.type == "cuda":
        obstacle = triton_obstacle(device.type)
    if not any(map(shutil.which, _COMPILERS)):
        obstacle = f"there is no C++ compiler ({', '.join(_COMPILERS)})"
    if obstacle is not None:
        raise ConfigError(f"infinipipe.model.compile cannot work here: {obstacle}; set it to false")
