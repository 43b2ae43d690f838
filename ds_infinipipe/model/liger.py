"""Whose RMSNorm, rotary embedding and SwiGLU the layers run: transformers' own, or Liger's.

Liger replaces what the layers' modules are made of in transformers' model files, so the choice is
made before layers are built and holds for the process. Parameters keep their names and shapes.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.hf import hf_class
from ds_infinipipe.ops.triton_support import triton_obstacle

__all__ = ["resolve_kernels", "use_kernels"]

logger = logging.getLogger(__name__)


def resolve_kernels(
    kernels: str, config: PreTrainedConfig, device_type: str, dtype: torch.dtype
) -> str:
    """ "liger" or "torch" for `kernels`; "auto" is Liger's on CUDA devices where it can run.

    Raises ConfigError where Liger is asked for and cannot run.
    """
    if kernels == "torch":
        return kernels
    obstacle = _obstacle(config, device_type, dtype)
    if obstacle is not None and kernels == "liger":
        raise ConfigError(f"infinipipe.model.kernels is liger, but {obstacle}; use auto or torch")
    name = "torch" if obstacle is not None else "liger"
    logger.info("norm, rotary and SwiGLU on %s in %s: %s", device_type, dtype, name)
    return name


def _obstacle(config: PreTrainedConfig, device_type: str, dtype: torch.dtype) -> str | None:
    """Why Liger's kernels cannot run, or None."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install 'ds-infinipipe[liger]')"
    obstacle = triton_obstacle(device_type)
    if obstacle is not None:
        return f"its kernels cannot run on {device_type}: {obstacle}"
    if dtype == torch.float64:
        return "its kernels compute in float32 and training is in float64"
    if config.hidden_act not in ("silu", "swish"):
        return f"its SwiGLU is for silu and the model has {config.hidden_act}"
    if getattr(config, "mlp_bias", False):
        return "its SwiGLU has no biases and the model has mlp_bias"
    if _liger_patch(config.model_type) is None:
        return f"it has no kernels for {config.model_type}"
    return None


def _liger_patch(kind: str) -> Callable[..., None] | None:
    """What puts Liger's kernels into transformers' model file of a family; None without any."""
    import liger_kernel.transformers

    return getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{kind}", None)


def use_kernels(config: PreTrainedConfig, kernels: str) -> None:
    """Let layers of the model's family be built, and rotate, with `kernels` from now on."""
    module = _modeling(config)
    for name, original in _originals(config.model_type, module).items():
        setattr(module, name, original)
    if kernels == "liger":
        patch = _liger_patch(config.model_type)
        assert patch is not None, "resolve_kernels lets no other family come here"
        patch(
            rope=True,
            rms_norm=True,
            swiglu=True,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
        )


def _modeling(config: PreTrainedConfig) -> ModuleType:
    return importlib.import_module(hf_class(config, "DecoderLayer").__module__)


@cache
def _originals(kind: str, module: ModuleType) -> Mapping[str, Any]:
    """What transformers calls by these names; first asked for before anything is replaced."""
    names = [n for n in vars(module) if n.endswith(("RMSNorm", "MLP"))]
    return {name: getattr(module, name) for name in (*names, "apply_rotary_pos_emb")}
