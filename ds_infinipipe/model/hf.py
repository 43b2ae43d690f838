"""Hugging Face decoders as they are: their config, classes, attention hook and rotary tables."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.json_file import read_json_object
from ds_infinipipe.model.context import ChunkContext, chunk_attention
from ds_infinipipe.planner.facts.models import model_from_hf

__all__ = [
    "ATTENTION_NAME",
    "hf_class",
    "keep_attention_outside_graphs",
    "load_hf_config",
    "make_rotary",
    "max_positions",
    "sliding_window",
]

ATTENTION_NAME = "infinipipe"
"""What transformers calls our attention in `config._attn_implementation`."""

# "dynamic" and "longrope" change their frequencies with the longest sequence of a forward call,
# so a slice would be rotated differently from its whole sequence
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def load_hf_config(source: str | Path | Mapping[str, Any] | PreTrainedConfig) -> PreTrainedConfig:
    """The config our layers are built from, checked; `source` is left as it is.

    `source` is a `config.json`, a folder that holds one, its content, or a transformers config.
    Raises ConfigError for a model that our layers would not train exactly.
    """
    values = _config_values(source)
    kind = values.pop("model_type", None)
    # sizes first: transformers would fill in those of its own default model
    model_from_hf({"model_type": kind, **values})
    _check_dtype(values)
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"transformers cannot read this {kind} config: {reason}; correct it in the model config"
        ) from error
    _check(config)
    config._attn_implementation = ATTENTION_NAME
    return config


def _config_values(source: str | Path | Mapping[str, Any] | PreTrainedConfig) -> dict[str, Any]:
    if isinstance(source, PreTrainedConfig):
        return source.to_dict()
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"there is no model config at {path}: give a config.json or a folder that holds one"
        )
    return read_json_object(path, "the model config")


def _check_dtype(values: Mapping[str, Any]) -> None:
    """The dtype of a config is not used, but transformers stumbles over one it does not know."""
    for name in ("dtype", "torch_dtype"):
        value = values.get(name)
        dtype = getattr(torch, value, None) if isinstance(value, str) else value
        if value is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError(
                f"the model config gives {name} = {value!r}; it must be a dtype of torch, such as "
                '"bfloat16"; bf16 in the DeepSpeed configuration says what is trained with'
            )


def _check(config: PreTrainedConfig) -> None:
    activation = config.hidden_act
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise ConfigError(
            f"hidden_act is {activation!r}, which transformers does not know; it knows "
            f"{', '.join(sorted(ACT2FN))}"
        )
    if config.attention_dropout:
        raise ConfigError(
            f"attention_dropout is {config.attention_dropout}: recomputed layers would drop other "
            "weights than the first time; set it to 0.0"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "the model is quantised (quantization_config): start from the unquantised checkpoint"
        )
    pad = config.pad_token_id
    if pad is not None and not -config.vocab_size <= pad < config.vocab_size:
        raise ConfigError(
            f"pad_token_id {pad} is outside the vocabulary of {config.vocab_size}: set it to null"
        )
    rope = _rope_type(config)
    if rope not in _ROPE_TYPES:
        raise ConfigError(
            f"rope type {rope!r} is not supported, its frequencies depend on the length of a "
            f"forward call; use one of {', '.join(_ROPE_TYPES)}"
        )


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Most tokens a query sees in the layers that have a window, None if no layer has one.

    The Qwens have a window only where `layer_types` say so.
    """
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _rope_type(config: PreTrainedConfig) -> str:
    return str((config.rope_parameters or {}).get("rope_type", "default"))


def max_positions(config: PreTrainedConfig) -> int:
    """Longest sequence the model is made for, in tokens."""
    return int(config.max_position_embeddings)


def hf_class(config: PreTrainedConfig, suffix: str) -> type[nn.Module]:
    """The model's own class by the end of its name: "DecoderLayer", "RMSNorm", ..."""
    kind = config.model_type
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    prefix = CONFIG_MAPPING[kind].__name__.removesuffix("Config")  # "Llama" of LlamaConfig
    found: type[nn.Module] = getattr(module, prefix + suffix)
    return found


def make_rotary(config: PreTrainedConfig, device: torch.device | str) -> nn.Module:
    """The model's rotary module: `rotary(x, position_ids [1, T])` gives cos and sin, [1, T, D].

    It has buffers but no parameters and belongs to no layer. Frequencies stay float32 in every
    model dtype; make it outside `deepspeed.zero.Init`, which would cast them.
    """
    rotary = hf_class(config, "RotaryEmbedding")(config=config).to(device)
    for buffer in rotary.buffers():
        assert buffer.dtype == torch.float32, "rotary frequencies were cast while being made"
    return rotary


def _infinipipe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    infinipipe_context: ChunkContext | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, T, D] in, [1, T, H, D] out; masks play no role."""
    if infinipipe_context is None:
        raise ConfigError(
            "attention 'infinipipe' runs only in ds_infinipipe's layers; load the model for other "
            "uses with attn_implementation='sdpa'"
        )
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    layer: Any = module.layer_idx
    out = chunk_attention(q, k, v, infinipipe_context, layer, scaling, sliding_window)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _infinipipe_attention)


def keep_attention_outside_graphs() -> None:
    """Let torch.compile end a graph before our attention and begin another one behind it."""
    outside = torch.compiler.disable(_infinipipe_attention)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, outside)
