"""The `optimizer` and `scheduler` sections: names, parameters and their ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.hints import format_close_matches
from ds_infinipipe.json_file import is_finite_number

__all__ = ["OPTIMIZERS", "SCHEDULERS", "check_optimizer", "check_scheduler"]

OPTIMIZERS = ("Adam", "AdamW")
"""Optimizers that run on torch's kernels and that the memory model and checkpoints are made for."""

# what is wrong with a value, or None
_Check = Callable[[Any], str | None]


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
