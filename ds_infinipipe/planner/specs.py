"""Models and layouts as plain data, and the built-in models; clusters have their own module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.clusters import (
    BUILTIN_CLUSTERS,
    ClusterSpec,
    load_cluster,
    read_named_json,
)

__all__ = [
    "BUILTIN_CLUSTERS",
    "BUILTIN_MODELS",
    "ClusterSpec",
    "Layout",
    "ModelSpec",
    "load_cluster",
    "load_model",
    "make_layout",
]

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

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


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What time and memory depend on.

    `dtype_bytes` is the size of a parameter and an activation element. `fused_kernels` says whether
    norm and SwiGLU keep only their inputs (fused kernels) or what the plain Hugging Face layers
    keep; it changes the activation bytes, nothing else.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = False
    dtype_bytes: int = 2
    fused_kernels: bool = True
    has_head_norms: bool = False
    """Every query and key head is normalised (Qwen3)."""
    offloads_optimizer: bool = False
    """Masters, Adam's states and gradient sums are in host memory (ZeRO-3)."""
    joins_qkv: bool = True
    """Query, key and value go through one all-to-all, not three."""
    sliding_window: int = 0
    """Keys that a query sees in `window_layers` of the layers; 0: all up to its own, everywhere."""
    window_layers: int = 0
    fp8: bool = False
    """Operands of the decoder layers' projections are rounded to 8 bits while they run."""
    shards_optimizer_over_dp: bool = False
    """Masters and Adam's states are cut over the replicas too (ZeRO-3)."""

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


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel degrees and the decoder layers each stage holds."""

    pp: int
    sp: int
    dp: int
    stage_layers: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return self.pp * self.sp * self.dp


def make_layout(model: ModelSpec, pp: int, sp: int, dp: int = 1) -> Layout:
    """Split the layers evenly, one more for the first stages where pp does not divide them.

    The last stage has the logits, so it never gets a spare layer. Raises ConfigError where the
    model cannot be laid out like this.
    """
    for name, degree in (("pp", pp), ("sp", sp), ("dp", dp)):
        if degree < 1:
            raise ConfigError(f"{name} is {degree}; every parallel degree must be at least 1")
    if pp > model.num_layers:
        raise ConfigError(
            f"pp {pp} is more than the {model.num_layers} layers of {model.name}: "
            f"each stage needs a layer, use pp <= {model.num_layers}"
        )
    _check_heads(model, sp)
    base, spare = divmod(model.num_layers, pp)
    return Layout(pp, sp, dp, tuple(base + (stage < spare) for stage in range(pp)))


def _check_heads(model: ModelSpec, sp: int) -> None:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % kv_heads:
        raise ConfigError(
            f"{model.name} has {heads} attention heads over {kv_heads} key/value heads; "
            "the first must be a multiple of the second"
        )
    if sp > heads:
        raise ConfigError(
            f"sp {sp} is more than the {heads} attention heads of {model.name}: "
            f"Ulysses gives each rank at least one head, use sp <= {heads}"
        )
    if heads == kv_heads:
        return  # multi-head attention: the heads are padded up to a multiple of sp
    if heads % sp or (kv_heads % sp and sp % kv_heads):
        divisors = [d for d in range(1, heads + 1) if heads % d == 0]
        fits = [d for d in divisors if kv_heads % d == 0 or d % kv_heads == 0]
        raise ConfigError(
            f"sp {sp} cannot share {heads} attention heads and {kv_heads} key/value heads of "
            f"{model.name} evenly: use sp in {fits}"
        )


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
        fused_kernels=False,
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
