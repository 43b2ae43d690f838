"""Models as plain data, the built-in ones, and how sp ranks share attention heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.clusters import read_named_json

__all__ = [
    "BUILTIN_MODELS",
    "SUPPORTED_MODEL_TYPES",
    "ModelSpec",
    "load_model",
    "local_heads",
    "local_kv_heads",
    "model_from_hf",
]

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)

_MAX_SIZE = 2**31

_DEFAULT_WINDOW, _DEFAULT_FULL_LAYERS = 4096, 28  # transformers'

# what transformers takes where a config.json has no such key; llama derives both
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}

SUPPORTED_MODEL_TYPES = tuple(_DEFAULTS)


def local_heads(model: ModelSpec, sp: int) -> int:
    """Query heads per rank after the all-to-all; padded up where sp does not divide them."""
    return -(-model.num_heads // sp)


def local_kv_heads(model: ModelSpec, sp: int) -> int:
    """Key/value heads per rank: padded up like the query heads, or one copy where sp exceeds them.

    With fewer kv heads than ranks every rank holds one head, so the stage holds sp heads in all.
    """
    return -(-model.num_kv_heads // sp)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder; widths in elements. How it is run stands in `setup.Execution`."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = False
    has_head_norms: bool = False
    """Every query and key head is normalised (Qwen3)."""
    sliding_window: int = 0
    """Keys that a query sees in `window_layers` of the layers; 0: all up to its own, everywhere."""
    window_layers: int = 0

    @property
    def kv_size(self) -> int:
        """D_kv: width of K (and of V) over all heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def layer_params(self) -> int:
        """Weights of one decoder layer (projections and SwiGLU; norms are negligible)."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        return attention + 3 * self.hidden_size * self.ffn_size

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size


def _llama(name: str, layers: int, hidden: int, ffn: int, heads: int) -> ModelSpec:
    return ModelSpec(name, layers, hidden, ffn, heads, heads, hidden // heads, 32000)


BUILTIN_MODELS: Mapping[str, ModelSpec] = {
    "llama-7b": _llama("llama-7b", 32, 4096, 11008, 32),
    "llama-13b": _llama("llama-13b", 40, 5120, 13824, 40),
    "llama-30b": _llama("llama-30b", 60, 6656, 17920, 52),
}


def model_from_hf(config: Mapping[str, Any], name: str = "") -> ModelSpec:
    """Read a Hugging Face `config.json`; raises ConfigError for unsupported or incomplete ones."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"model type {kind!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    absent = [name for name in _SIZES if name not in config]
    if absent:
        raise ConfigError(
            f"the model config lacks {', '.join(absent)}; give a complete config.json"
        )
    config = {**_DEFAULTS[kind], **config}
    sizes = {name: _size(config, name) for name in _SIZES}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    kv_heads = _optional_size(config, "num_key_value_heads")
    head_dim = _optional_size(config, "head_dim")
    # transformers refuses such a llama, with a head_dim too
    if hidden % heads and (head_dim is None or kind == "llama"):
        repair = "" if kind == "llama" else ", or give head_dim"
        raise ConfigError(
            f"the model config gives hidden_size = {hidden}, no multiple of num_attention_heads = "
            f"{heads}: make it one, such as {heads * (hidden // heads + 1)}{repair}"
        )
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ConfigError(
            f"the model config gives tie_word_embeddings = {tied!r}; it must be true or false"
        )
    window, window_layers = _window(config, kind, sizes["num_hidden_layers"])
    return ModelSpec(
        name=name or kind,
        num_layers=sizes["num_hidden_layers"],
        hidden_size=hidden,
        ffn_size=sizes["intermediate_size"],
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=hidden // heads if head_dim is None else head_dim,
        vocab_size=sizes["vocab_size"],
        tied_embeddings=tied,
        has_head_norms=kind == "qwen3",
        sliding_window=window,
        window_layers=window_layers,
    )


def _window(config: Mapping[str, Any], kind: str, num_layers: int) -> tuple[int, int]:
    """Keys in a window and the number of layers that have it, both 0 for none.

    As transformers reads it: of Mistral all layers have the window, of Qwen those named.
    """
    if kind == "llama" or (kind != "mistral" and not config.get("use_sliding_window", False)):
        return 0, 0
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    if window is None:
        return 0, 0
    layer_types = config.get("layer_types")
    if kind == "mistral":
        layers = num_layers
    elif layer_types is not None:
        layers = sum(name == "sliding_attention" for name in layer_types)
    else:
        layers = max(0, num_layers - config.get("max_window_layers", _DEFAULT_FULL_LAYERS))
    size = _size({"sliding_window": window}, "sliding_window")
    return (size, layers) if layers else (0, 0)


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MAX_SIZE:
        raise ConfigError(
            f"the model config gives {name} = {value!r}; it must be an integer of at least 1 and "
            "below 2^31"
        )
    return value


def _optional_size(config: Mapping[str, Any], name: str) -> int | None:
    """None where transformers derives it from the others."""
    return None if config.get(name) is None else _size(config, name)


def load_model(name_or_path: str) -> ModelSpec:
    """A built-in name, a `config.json`, or a folder that holds one."""
    if name_or_path in BUILTIN_MODELS:
        return BUILTIN_MODELS[name_or_path]
    path = Path(name_or_path)
    is_folder = bool(name_or_path) and path.is_dir()
    path = path / "config.json" if is_folder else path
    if is_folder and not path.is_file():
        raise ConfigError(f"model folder {name_or_path} holds no config.json")
    content = read_named_json(str(path) if name_or_path else "", "model", BUILTIN_MODELS)
    return model_from_hf(content, path.parent.name or path.stem)
