"""The kernels of a run, chosen and tried once before the first step."""

from __future__ import annotations

import torch

from ds_infinipipe.model.compiling import check_compiling
from ds_infinipipe.model.hf import sliding_window
from ds_infinipipe.ops.attention import check_alignment, resolve_attention
from ds_infinipipe.ops.cross_entropy import resolve_cross_entropy
from ds_infinipipe.ops.fp8 import check_fp8
from ds_infinipipe.runtime.module import InfiniPipeModule

__all__ = ["choose_kernels"]


def choose_kernels(model: InfiniPipeModule, device: torch.device) -> str:
    """The name of the attention to use; raises ConfigError for kernels that cannot run here."""
    wanted = model.settings.runtime
    attention = resolve_attention(wanted.attention, device, model.dtype)
    windowed = sliding_window(model.hf_config) is not None
    check_alignment(device, model.dtype, attention, windowed=windowed)
    resolve_cross_entropy(wanted.cross_entropy, device, model.dtype)
    if model.settings.model.fp8 != "off":
        spec = model.spec
        widths = {"hidden_size": spec.hidden_size, "intermediate_size": spec.ffn_size}
        widths |= {"width of all heads": spec.query_size, "width of key heads": spec.kv_size}
        check_fp8(model.settings.model.fp8, device, model.dtype, widths)
    if model.settings.model.compile:
        check_compiling(device)
    return attention
