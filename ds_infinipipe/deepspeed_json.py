"""The DeepSpeed side of the configuration file: reading it, its keys, what DeepSpeed needs of it.

DeepSpeed keeps unknown top-level sections untouched, which is where `"infinipipe"` lives, but it
says nothing about misspelt ones; `warn_unknown_keys` does.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ds_infinipipe.errors import ConfigError

__all__ = [
    "SECTION",
    "derive_deepspeed_settings",
    "format_close_matches",
    "read_deepspeed_json",
    "sequences_per_step",
    "warn_unknown_keys",
]

logger = logging.getLogger(__name__)

SECTION = "infinipipe"

DEEPSPEED_KEYS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "communication_data_type",
        "comms_logger",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "ddp_bf16",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "nebula",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)

_REDUCE_BUCKET_ELEMENTS = 50_000_000
_ADAM_TYPES = frozenset({"adam", "adamw"})

# dotted key -> (values that work, what to do instead)
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "fp16.enabled": ((False, "auto"), "fp16 is not supported yet; use bf16 or fp32"),
    "amp.enabled": ((False,), "apex amp is not supported; use bf16 or fp32"),
    "torch_autocast.enabled": ((False,), "autocast is not supported; use bf16 or fp32"),
    "zero_optimization.stage": ((0, 3), "use 3 to shard inside a stage, or 0 not to shard"),
    "zero_optimization.offload_param.device": (("none",), "offloading is not supported yet"),
    "zero_optimization.offload_optimizer.device": (("none",), "offloading is not supported yet"),
    "zero_optimization.zero_hpz_partition_size": ((1,), "ZeRO++ is not supported yet"),
    "zero_optimization.zero_quantized_weights": ((False,), "ZeRO++ is not supported yet"),
    "zero_optimization.zero_quantized_gradients": ((False,), "ZeRO++ is not supported yet"),
    "zero_optimization.reduce_scatter": (
        (True, "auto"),
        "gradients are always reduce-scattered; remove it",
    ),
    "gradient_allreduce_op": (("mean",), "the loss is already summed over tokens; remove it"),
    "prescale_gradients": ((False,), "the loss is already normalised by tokens; remove it"),
    "gradient_predivide_factor": ((1, 1.0), "the loss is already normalised by tokens; remove it"),
    "gradient_accumulation_steps": (
        (1, "auto"),
        "chunks take the place of micro-batches; set train_batch_size, the sequences of a step",
    ),
    "train_micro_batch_size_per_gpu": (
        (1, "auto"),
        "chunks take the place of micro-batches; set train_batch_size, the sequences of a step",
    ),
    "sequence_parallel_size": ((), "set infinipipe.parallel.sp instead"),
    "tensor_parallel.autotp_size": ((0, 1), "tensor parallelism is not supported; use sp"),
}

# "auto" here means DeepSpeed's or the optimizer's own default
_AUTO_SECTIONS = (
    "zero_optimization",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "fp16",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def read_deepspeed_json(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as a dictionary of its own; raises ConfigError where it cannot be read."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the DeepSpeed configuration {path} cannot be read: {error}") from error
    try:
        content = json.loads(text, object_pairs_hook=_reject_duplicates)
    except ValueError as error:
        raise ConfigError(f"the DeepSpeed configuration {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"the DeepSpeed configuration {path} must hold one JSON object")
    return content


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"key {repeated[0]!r} stands twice in the same object")
    return dict(pairs)


def format_close_matches(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for a likely typo, else the list of what is known."""
    names = sorted(known)
    matches = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    if matches:
        return "; did you mean " + " or ".join(repr(m) for m in matches) + "?"
    return f"; known are {', '.join(names)}" if names else ""


def warn_unknown_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Log every top-level key DeepSpeed does not know; returns the messages.

    Raises ConfigError where the unknown key is our own section misspelt, because all of its
    settings would be lost.
    """
    known = DEEPSPEED_KEYS | {SECTION}
    messages = []
    for key in config:
        if key in known:
            continue
        if SECTION not in config and difflib.get_close_matches(key.lower(), [SECTION], cutoff=0.8):
            raise ConfigError(f"section {key!r} is unknown; did you mean {SECTION!r}?")
        matches = difflib.get_close_matches(key, sorted(known), n=2, cutoff=0.6)
        hint = f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""
        messages.append(f"key {key!r} of the DeepSpeed configuration is unknown{hint}")
    for message in messages:
        logger.warning("%s", message)
    return tuple(messages)


def sequences_per_step(config: Mapping[str, Any]) -> int:
    """`train_batch_size`: sequences per optimizer step; ConfigError unless it is at least 1."""
    value = config.get("train_batch_size")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"train_batch_size is {value!r}; give the number of sequences of one optimizer step, "
            "an integer of at least 1"
        )
    return value


def derive_deepspeed_settings(config: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """What DeepSpeed itself is given; `shards` is sp, the ranks its ZeRO shards over.

    DeepSpeed insists on train_batch = micro * accumulation * data-parallel size, but a step of
    ours has as many chunks as its plan says. So all three are set to their smallest values and
    `sequences_per_step` stays ours. Raises ConfigError for settings that cannot work here.
    """
    _refuse_unsupported(config)
    sequences_per_step(config)
    derived = copy.deepcopy({k: v for k, v in config.items() if k != SECTION})
    derived.update(
        train_batch_size=shards, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1
    )
    _drop_auto(derived, ())
    zero = derived.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)
    zero["reduce_scatter"] = True
    zero.setdefault("reduce_bucket_size", _REDUCE_BUCKET_ELEMENTS)
    _complete_optimizer(derived)
    if _lookup(derived, "bf16.enabled"):
        derived.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    return derived


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key in ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16", "data_types"):
        if not isinstance(config.get(key, {}), Mapping):
            raise ConfigError(f"{key} is {config[key]!r}; it must be an object")
    for key, (allowed, repair) in _REFUSED.items():
        value = _lookup(config, key)
        if value is not None and not any(_is_same(value, a) for a in allowed):
            raise ConfigError(f"{key} is {value!r}: {repair}")


def _is_same(value: Any, allowed: Any) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _lookup(config: Mapping[str, Any], dotted: str) -> Any:
    node: Any = config
    for name in dotted.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return None
        node = node[name]
    return node


def _drop_auto(node: dict[str, Any], path: tuple[str, ...]) -> None:
    for name in list(node):
        here = (*path, name)
        if isinstance(node[name], dict):
            _drop_auto(node[name], here)
        elif node[name] == "auto":
            dotted = ".".join(here)
            if not dotted.startswith(_AUTO_SECTIONS):
                raise ConfigError(f'{dotted} is "auto", which nothing here can fill: give a value')
            del node[name]


def _complete_optimizer(derived: dict[str, Any]) -> None:
    """Use torch's Adam unless told otherwise: DeepSpeed's own is compiled at the first step."""
    optimizer = derived.get("optimizer")
    if optimizer is None:
        return
    if "type" not in optimizer:
        raise ConfigError(f'optimizer is {optimizer!r}; give {{"type": "AdamW", "params": ...}}')
    if str(optimizer["type"]).lower() in _ADAM_TYPES:
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
