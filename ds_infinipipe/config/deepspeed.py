"""The DeepSpeed side of the configuration file: reading it, its keys, what DeepSpeed needs of it.

DeepSpeed keeps unknown top-level sections untouched, which is where `"infinipipe"` lives, but it
says nothing about misspelt ones; `refuse_misspelt_keys` does.
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_infinipipe.config.deepspeed_rules import check_values, refuse_unsupported
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.json_file import read_json_object

__all__ = [
    "SECTION",
    "check_deepspeed_settings",
    "derive_deepspeed_settings",
    "offloads_optimizer",
    "read_deepspeed_json",
    "refuse_misspelt_keys",
    "require_optimizer",
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
        "graph_harvesting",
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

_KNOWN = DEEPSPEED_KEYS | {SECTION}
# from here on a key is taken for a misspelt one: "optim" is, "training" and "meta" are not
_LIKENESS = 0.7

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
        return _normalise(copy.deepcopy(dict(source)))
    what = "the DeepSpeed configuration"
    return _normalise(read_json_object(source, what, pairs_hook=_reject_duplicates))


def _normalise(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's older name of a section becomes the newer one."""
    if "bfloat16" in config:
        if "bf16" in config:
            raise ConfigError("bf16 and its older name bfloat16 are both given; remove bfloat16")
        config["bf16"] = config.pop("bfloat16")
    return config


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"key {repeated[0]!r} stands twice in the same object")
    return dict(pairs)


def refuse_misspelt_keys(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a top-level key that is no key of DeepSpeed's but looks like one.

    DeepSpeed would train without what it asks for. Keys that begin with "_" are notes.
    """
    for key in _unknown_keys(config):
        matches = difflib.get_close_matches(key.lower(), sorted(_KNOWN), n=2, cutoff=_LIKENESS)
        if matches:
            raise ConfigError(
                f"key {key!r} of the DeepSpeed configuration is unknown; did you mean "
                f"{' or '.join(map(repr, matches))}? If it is a note, call it '_{key}'"
            )


def warn_unknown_keys(config: Mapping[str, Any]) -> None:
    """Log the top-level keys that neither DeepSpeed nor we read; for one rank of a run."""
    for key in _unknown_keys(config):
        logger.warning("key %r of the DeepSpeed configuration is unknown: nothing reads it", key)


def _unknown_keys(config: Mapping[str, Any]) -> list[str]:
    return [key for key in map(str, config) if key not in _KNOWN and not key.startswith("_")]


def sequences_per_step(config: Mapping[str, Any]) -> int:
    """`train_batch_size`: sequences per optimizer step; ConfigError unless it is at least 1."""
    value = config.get("train_batch_size")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        state = "missing" if "train_batch_size" not in config else repr(value)
        raise ConfigError(
            f"train_batch_size is {state}; give the number of sequences of one optimizer step, "
            "an integer of at least 1"
        )
    return value


def check_deepspeed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's part of the configuration, without "auto", whatever the number of ranks.

    Raises ConfigError for settings that cannot work here.
    """
    checked = _normalise(copy.deepcopy({k: v for k, v in config.items() if k != SECTION}))
    refuse_misspelt_keys(checked)
    refuse_unsupported(checked)
    sequences_per_step(checked)
    _drop_auto(checked, ())
    check_values(checked)
    return checked


def require_optimizer(config: Mapping[str, Any]) -> None:
    """Raise ConfigError where there is no `optimizer` section, for a run that brings none."""
    if "optimizer" not in config:
        raise ConfigError(
            'there is no optimizer: give {"optimizer": {"type": "AdamW", "params": {"lr": ...}}} '
            "in the DeepSpeed configuration"
        )


def derive_deepspeed_settings(config: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """What DeepSpeed itself is given; `shards` is sp, the ranks its ZeRO shards over.

    DeepSpeed insists on train_batch = micro * accumulation * data-parallel size, but a step of
    ours has as many chunks as its plan says. So all three are set to their smallest values and
    `sequences_per_step` stays ours. Raises ConfigError for settings that cannot work here.
    """
    derived = check_deepspeed_settings(config)
    derived.update(
        train_batch_size=shards, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1
    )
    zero = derived.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)
    zero["reduce_scatter"] = True
    _complete_optimizer(derived)
    if offloads_optimizer(derived):
        # a run may bring an optimizer of its own; DeepSpeed takes none but its compiled ones else
        derived.setdefault("zero_force_ds_cpu_optimizer", False)
    halves = [name for name in ("bf16", "fp16") if derived.get(name, {}).get("enabled")]
    if halves and zero["stage"] == 3:
        derived.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    elif halves:
        # DeepSpeed has no optimizer for this mix; `runtime.shards` accumulates in fp32
        derived.get("data_types", {}).pop("grad_accum_dtype", None)
    return derived


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """True where masters, Adam's states and gradients are to be in host memory."""
    zero = config.get("zero_optimization") or {}
    return (zero.get("offload_optimizer") or {}).get("device") == "cpu"


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
    """Use torch's Adam unless told otherwise: DeepSpeed's own is compiled at the first step.

    The fused one takes one pass over the states and no memory beside them.
    """
    optimizer = derived.get("optimizer")
    if optimizer is None:
        return
    params = optimizer.setdefault("params", {})
    params.setdefault("torch_adam", True)
    others = params.get("foreach") or params.get("differentiable")
    if params["torch_adam"] and not others and params.get("fused") is None:
        params["fused"] = True
