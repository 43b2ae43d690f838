"""Which values of DeepSpeed's own keys can work here; all of it without torch.

Names are those of DeepSpeed 0.19.8. What DeepSpeed would ignore, or trip over after minutes on
every rank, is refused here with the key, its value and what to do instead. The `optimizer` and
`scheduler` sections have tables of their own: names, parameters and their ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.json_file import format_close_matches, is_finite_number

__all__ = [
    "OPTIMIZERS",
    "SCHEDULERS",
    "check_optimizer",
    "check_scheduler",
    "check_values",
    "refuse_unsupported",
]

_OBJECTS = (
    "activation_checkpointing",
    "bf16",
    "checkpoint",
    "comms_logger",
    "compile",
    "data_types",
    "flops_profiler",
    "fp16",
    "hybrid_engine",
    "optimizer",
    "scheduler",
    "tensor_parallel",
    "torch_autocast",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)
_OFFLOAD_STATES = (
    "only the optimizer is offloaded: remove it and set zero_optimization.offload_optimizer to "
    '{"device": "cpu"}'
)
_OFFLOAD_ALL = "all of the optimizer is offloaded, to host memory: remove it"
_NO_ZERO_PLUS = "ZeRO++ is not supported yet"
_NORMALISED = "the loss is already normalised by tokens; remove it"
_NO_MICRO_BATCH = (
    "chunks take the place of micro-batches; set train_batch_size, the sequences of a step"
)
# dotted key -> (values that work, what to do instead)
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "fp16.auto_cast": ((False,), "inputs are token ids, which have nothing to cast; remove it"),
    "fp16.fp16_master_weights_and_grads": ((False,), "master weights are fp32 here; remove it"),
    "torch_autocast.enabled": ((False,), "autocast is not supported; use bf16, fp16 or fp32"),
    "hybrid_engine.enabled": ((False,), "the hybrid engine is not supported; remove the section"),
    "compile.deepcompile": ((False,), "DeepCompile is not supported; remove it"),
    "autotuning.enabled": ((False,), "autotuning is not supported; remove the section"),
    "data_efficiency.enabled": ((False,), "data efficiency is not supported; remove the section"),
    "bf16.bf16_master_weights_and_grads": ((False,), "master weights are fp32 here; remove it"),
    "bf16.bf16_optimizer_states": ((False,), "optimizer states are fp32 here; remove it"),
    "data_types.grad_accum_dtype": (
        ("fp32", "bf16"),
        "use fp32, or bf16 for a model in bf16",
    ),
    "communication_data_type": (("fp32", "bf16"), "use fp32 or bf16"),
    "zero_optimization.stage": ((0, 3), "use 3 to shard inside a stage, or 0 not to shard"),
    "zero_optimization.cpu_offload": ((False,), _OFFLOAD_STATES),
    "zero_optimization.cpu_offload_param": ((False,), _OFFLOAD_STATES),
    "zero_optimization.cpu_offload_params": ((False,), _OFFLOAD_STATES),
    "zero_optimization.cpu_offload_use_pin_memory": ((False,), _OFFLOAD_STATES),
    "zero_optimization.offload_param.device": (("none",), _OFFLOAD_STATES),
    "zero_optimization.offload_optimizer.device": (
        ("none", "cpu"),
        "optimizer states are offloaded to host memory only: set it to cpu",
    ),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), _OFFLOAD_ALL),
    "zero_optimization.offload_optimizer.super_offload": ((False,), _OFFLOAD_ALL),
    "zero_optimization.zenflow": ((), _OFFLOAD_STATES),
    "zero_optimization.zero_hpz_partition_size": ((1,), _NO_ZERO_PLUS),
    "zero_optimization.zero_quantized_weights": ((False,), _NO_ZERO_PLUS),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _NO_ZERO_PLUS),
    "zero_optimization.zero_quantized_gradients": ((False,), _NO_ZERO_PLUS),
    "zero_optimization.zeropp_loco_param": ((), _NO_ZERO_PLUS),
    "zero_optimization.mics_shard_size": ((-1,), "MiCS is not supported; remove it"),
    "zero_optimization.mics_hierarchical_params_gather": (
        (False,),
        "MiCS is not supported; remove it",
    ),
    "zero_optimization.compute_grad_norm": ((True,), "the norm is needed for clipping; remove it"),
    "zero_optimization.reduce_scatter": (
        (True, "auto"),
        "gradients are always reduce-scattered; remove it",
    ),
    "gradient_allreduce_op": (("mean",), "the loss is already summed over tokens; remove it"),
    "prescale_gradients": ((False,), _NORMALISED),
    "gradient_predivide_factor": ((1, 1.0), _NORMALISED),
    "gradient_accumulation_steps": ((1, "auto"), _NO_MICRO_BATCH),
    "train_micro_batch_size_per_gpu": ((1, "auto"), _NO_MICRO_BATCH),
    "sequence_parallel_size": ((), "set infinipipe.parallel.sp instead"),
    "tensor_parallel.autotp_size": ((0, 1), "tensor parallelism is not supported; use sp"),
    "pipeline": (
        ({},),
        "it has no effect here; set infinipipe.parallel.pp and infinipipe.planner instead",
    ),
}
_REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)
_ZERO_FLAGS = frozenset(
    {
        "allgather_partitions",
        "allgather_sequential",
        "compute_grad_norm",
        "contiguous_gradients",
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "elastic_checkpoint",
        "enable_sanity_checks",
        "gather_16bit_weights_on_model_save",
        "ignore_unused_parameters",
        "legacy_stage1",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "overlap_comm",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "reduce_scatter",
        "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory",
        "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "stage3_use_all_reduce_for_fetch_params",
        "use_all_reduce_for_fetch_params",
        "use_multi_rank_bucket_allreduce",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    }
)
_ZERO_SIZES = frozenset(
    {
        "allgather_bucket_size",
        "max_live_parameters",
        "max_reuse_distance",
        "model_persistence_threshold",
        "module_granularity_threshold",
        "param_persistence_threshold",
        "prefetch_bucket_size",
        "reduce_bucket_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "sub_group_size",
        "zero_hpz_partition_size",
    }
)
_OFFLOAD_KEYS = frozenset(
    {
        "buffer_count",
        "cpuadam_cores_perc",
        "device",
        "fast_init",
        "nvme_path",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "ratio",
        "super_offload",
    }
)
_ZERO_OTHERS = frozenset({"leaf_module", "offload_optimizer", "offload_param", "stage", "zenflow"})
ZERO_KEYS = _ZERO_FLAGS | _ZERO_SIZES | _ZERO_OTHERS
_MAX_POWER = 64
# the least and the most
_FP16_COUNTS: Mapping[str, tuple[int, int | None]] = {
    "initial_scale_power": (0, _MAX_POWER - 1),
    "loss_scale_window": (1, None),
    "hysteresis": (1, None),
    "min_loss_scale": (1, None),
}
_FP16_KEYS = frozenset(
    {
        "auto_cast",
        "consecutive_hysteresis",
        "enabled",
        "fp16_master_weights_and_grads",
        "loss_scale",
        *_FP16_COUNTS,
    }
)
# they may be absent or null, and switch something off then
_FLAGS = (
    "bf16.enabled",
    "bf16.check_grad_overflow",
    "bf16.immediate_grad_update",
    "fp16.enabled",
    "fp16.consecutive_hysteresis",
    "zero_optimization.offload_optimizer.fast_init",
    "zero_optimization.offload_optimizer.pin_memory",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
)
OPTIMIZERS = ("Adam", "AdamW")
"""Optimizers that run on torch's kernels and that the memory model and checkpoints are made for."""
# what is wrong with a value, or None
_Check = Callable[[Any], str | None]


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first key that asks for what does not work here.

    "auto" is still in place; `config` is the user's dictionary.
    """
    for key in _REMOVED:
        if key in config:
            raise ConfigError(f"{key} is {config[key]!r}: DeepSpeed has removed it; remove the key")
    for key in _OBJECTS:
        value = _lookup(config, key, {})
        optional = key.startswith("zero_optimization.")
        if not isinstance(value, Mapping) and not (optional and value is None):
            raise ConfigError(f"{key} is {value!r}; it must be an object")
    for key, (allowed, repair) in _REFUSED.items():
        value = _lookup(config, key)
        if value is not None and not any(_is_same(value, a) for a in allowed):
            raise ConfigError(f"{key} is {value!r}: {repair}")
    efficiency = config.get("data_efficiency")
    if efficiency and not (isinstance(efficiency, Mapping) and efficiency.get("enabled") is False):
        raise ConfigError(
            f"data_efficiency is {efficiency!r}: data efficiency is not supported; remove the "
            "section"
        )


def check_values(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of the wrong kind or out of range; there is no "auto" left."""
    for key in _FLAGS:
        value = _lookup(config, key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}; it must be true or false")
    clipping = config.get("gradient_clipping", 0.0)
    if not is_finite_number(clipping) or clipping < 0:
        raise ConfigError(
            f"gradient_clipping is {clipping!r}; it must be a number of at least 0, the largest "
            "norm of the gradients, or 0 not to clip"
        )
    every = config.get("steps_per_print")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigError(f"steps_per_print is {every!r}; it must be an integer of at least 1")
    if _lookup(config, "data_types.grad_accum_dtype") == "bf16" and not _lookup(
        config, "bf16.enabled"
    ):
        raise ConfigError("data_types.grad_accum_dtype is 'bf16' but bf16 is off: use fp32")
    _check_fp16(config)
    _check_zero(config.get("zero_optimization", {}))
    if "optimizer" in config:
        check_optimizer(config["optimizer"])
    if "scheduler" in config:
        check_scheduler(config["scheduler"])


def _check_fp16(config: Mapping[str, Any]) -> None:
    section = config.get("fp16", {})
    for name, value in section.items():
        where = f"fp16.{name}"
        if name not in _FP16_KEYS:
            raise ConfigError(f"{where} is unknown{format_close_matches(name, _FP16_KEYS)}")
        if name == "loss_scale" and not (is_finite_number(value) and 0 <= value < 2**_MAX_POWER):
            raise ConfigError(
                f"{where} is {value!r}; it must be a number below 2**{_MAX_POWER}, or 0 for a "
                "scale that adapts itself"
            )
        if name in _FP16_COUNTS:
            least, most = _FP16_COUNTS[name]
            if not _is_size(value, least) or (most is not None and value > most):
                upto = "" if most is None else f" and at most {most}"
                raise ConfigError(
                    f"{where} is {value!r}; it must be a whole number of at least {least}{upto}"
                )
    if section.get("enabled") and _lookup(config, "bf16.enabled"):
        raise ConfigError("bf16.enabled and fp16.enabled are both true: switch one off")


def _check_zero(section: Mapping[str, Any]) -> None:
    for name, value in section.items():
        where = f"zero_optimization.{name}"
        if name in _ZERO_FLAGS and not isinstance(value, bool) and value is not None:
            raise ConfigError(f"{where} is {value!r}; it must be true or false")
        if name in _ZERO_SIZES and not _is_size(value, 1 if name == "reduce_bucket_size" else 0):
            raise ConfigError(f"{where} is {value!r}; it must be a whole number above 0")
        if name not in ZERO_KEYS:
            raise ConfigError(f"{where} is unknown{format_close_matches(name, ZERO_KEYS)}")
    offload = section.get("offload_optimizer") or {}
    for name in offload:
        if name not in _OFFLOAD_KEYS:
            close = format_close_matches(name, _OFFLOAD_KEYS)
            raise ConfigError(f"zero_optimization.offload_optimizer.{name} is unknown{close}")
    if offload.get("device") == "cpu" and section.get("stage", 0) != 3:
        raise ConfigError(
            "zero_optimization.offload_optimizer.device is 'cpu' but zero_optimization.stage is "
            f"{section.get('stage', 0)}: set the stage to 3, or remove offload_optimizer"
        )


def _is_size(value: Any, least: int) -> bool:
    """Whole numbers may be written 5e8."""
    return is_finite_number(value) and value == int(value) and value >= least


def _is_same(value: Any, allowed: Any) -> bool:
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _lookup(config: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    node: Any = config
    for name in dotted.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return node


def _number(least: float = 0.0, below: float = math.inf, *, or_null: bool = False) -> _Check:
    def check(value: Any) -> str | None:
        if value is None and or_null:
            return None
        if is_finite_number(value) and least <= value < below:
            return None
        limit = "" if below == math.inf else f" and below {below:g}"
        from_ = "finite number" if least == -math.inf else f"number of at least {least:g}"
        return f"it must be a {from_}{limit}"

    return check


def _count(least: int) -> _Check:
    def check(value: Any) -> str | None:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return None if is_whole and value >= least else f"it must be an integer of at least {least}"

    return check


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "it must be true or false"


def _flag_or_null(value: Any) -> str | None:
    return None if value is None else _flag(value)


def _betas(value: Any) -> str | None:
    fits = isinstance(value, (list, tuple)) and len(value) == 2
    fits = fits and all(is_finite_number(beta) and 0.0 <= beta < 1.0 for beta in value)
    return None if fits else "it must be a list of two numbers of at least 0 and below 1"


def _rate(value: Any) -> str | None:
    """A learning rate, or one for each group of parameters."""
    rates = value if isinstance(value, (list, tuple)) and value else [value]
    fits = all(is_finite_number(rate) and rate >= 0 for rate in rates)
    return None if fits else "it must be a number of at least 0"


def _rate_or_null(value: Any) -> str | None:
    return None if value is None else _rate(value)


def _warmup_type(value: Any) -> str | None:
    return None if value in ("log", "linear") else "it must be 'log' or 'linear'"


_ADAM: Mapping[str, _Check] = {
    "lr": _number(),
    "betas": _betas,
    "eps": _number(),
    "weight_decay": _number(),
    "adam_w_mode": _flag,
    "torch_adam": _flag,
    "fp32_optimizer_states": _flag_or_null,
}

_TORCH_ADAM: Mapping[str, _Check] = {
    "amsgrad": _flag,
    "capturable": _flag,
    "differentiable": _flag,
    "foreach": _flag_or_null,
    "fused": _flag_or_null,
    "maximize": _flag,
}

_DEEPSPEED_ADAM: Mapping[str, _Check] = {
    "amsgrad": _flag,
    "bias_correction": _flag,
    "set_grad_none": _flag,
}

_LAST: Mapping[str, _Check] = {"last_batch_iteration": _count(-1)}

_WARMUP: Mapping[str, _Check] = {
    "warmup_num_steps": _count(1),
    "warmup_type": _warmup_type,
    **_LAST,
}

_WARMUP_LR: Mapping[str, _Check] = {
    "warmup_min_lr": _rate,
    "warmup_max_lr": _rate_or_null,
    **_WARMUP,
}

_ANY = _number(-math.inf)

_MOMENTUM = _number(0.0, 1.0)

SCHEDULERS: Mapping[str, tuple[tuple[str, ...], Mapping[str, _Check]]] = {
    "LRRangeTest": (
        (),
        {
            "lr_range_test_min_lr": _rate,
            "lr_range_test_step_rate": _ANY,
            "lr_range_test_step_size": _count(1),
            "lr_range_test_staircase": _flag,
            **_LAST,
        },
    ),
    "OneCycle": (
        ("cycle_min_lr", "cycle_max_lr"),
        {
            "cycle_min_lr": _rate,
            "cycle_max_lr": _rate,
            "decay_lr_rate": _number(),
            "cycle_first_step_size": _count(1),
            "cycle_second_step_size": _number(or_null=True),
            "cycle_first_stair_count": _count(0),
            "cycle_second_stair_count": _number(or_null=True),
            "decay_step_size": _number(),
            "cycle_momentum": _flag,
            "cycle_min_mom": _MOMENTUM,
            "cycle_max_mom": _MOMENTUM,
            "decay_mom_rate": _number(),
            **_LAST,
        },
    ),
    "WarmupLR": ((), _WARMUP_LR),
    "WarmupDecayLR": (
        ("total_num_steps",),
        {"total_num_steps": _count(1), **_WARMUP_LR, "warmup_max_lr": _rate},
    ),
    "WarmupCosineLR": (
        ("total_num_steps",),
        {
            "total_num_steps": _count(1),
            "warmup_min_ratio": _number(),
            "cos_min_ratio": _number(),
            **_WARMUP,
        },
    ),
}
"""By DeepSpeed's names: the parameters that must be given, and what all of them must be."""


def check_optimizer(section: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the section names an optimizer that works, with fitting values."""
    kind = section.get("type")
    if kind is None:
        raise ConfigError(
            f'optimizer is {dict(section)!r}; give {{"type": "AdamW", "params": ...}}'
        )
    if not isinstance(kind, str) or kind.lower() not in {name.lower() for name in OPTIMIZERS}:
        raise ConfigError(
            f"optimizer.type is {kind!r}; only {' and '.join(OPTIMIZERS)} work here, for which "
            "memory is planned and checkpoints are made"
        )
    _check_names("optimizer", section, ("type", "params", "legacy_fusion"))
    params = _params("optimizer", section)
    if "max_grad_norm" in params:
        raise ConfigError(
            f"optimizer.params.max_grad_norm is {params['max_grad_norm']!r}; set gradient_clipping "
            "instead"
        )
    own = _DEEPSPEED_ADAM if params.get("torch_adam") is False else _TORCH_ADAM
    _check_params("optimizer.params", params, {**_ADAM, **own})


def check_scheduler(section: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the section names one of `SCHEDULERS`, with fitting values."""
    kind = section.get("type")
    if not isinstance(kind, str) or kind not in SCHEDULERS:
        raise ConfigError(
            f"scheduler.type is {kind!r}; it must be one of {', '.join(SCHEDULERS)}, or remove the "
            "section"
        )
    _check_names("scheduler", section, ("type", "params"))
    required, known = SCHEDULERS[kind]
    params = _params("scheduler", section)
    absent = [name for name in required if name not in params]
    if absent:
        raise ConfigError(f"scheduler.params lacks {' and '.join(absent)}, which {kind} needs")
    _check_params("scheduler.params", params, known)


def _params(section_name: str, section: Mapping[str, Any]) -> Mapping[str, Any]:
    params = section.get("params", {})
    if not isinstance(params, Mapping):
        raise ConfigError(f"{section_name}.params is {params!r}; it must be an object")
    return params


def _check_names(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}.{name} is unknown{format_close_matches(name, known)}")


def _check_params(where: str, params: Mapping[str, Any], known: Mapping[str, _Check]) -> None:
    for name, value in params.items():
        if name not in known:
            raise ConfigError(f"{where}.{name} is unknown{format_close_matches(name, known)}")
        wrong = known[name](value)
        if wrong is not None:
            raise ConfigError(f"{where}.{name} is {value!r}; {wrong}")
