"""All that time and bytes depend on: a model, how it is run, on which devices, cut up how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.clusters import ClusterSpec
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS, ModelSpec

__all__ = ["Execution", "Layout", "Setup", "make_layout", "make_setup"]

_GIB = 2**30


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


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model is run. Raises ConfigError for what no run can be."""

    zero_stage: int = 3
    """ZeRO inside a stage: 0 keeps all states on every rank, 3 shards them over its sp ranks."""
    dtype_bytes: int = 2
    """Bytes of an element of a parameter or an activation."""
    fused_kernels: bool = True
    """Norm and SwiGLU keep only their inputs, not what plain Hugging Face layers keep; it changes
    the activations' bytes, nothing else."""
    fp8: bool = False
    """Operands of the decoder layers' projections are rounded to 8 bits while they run."""
    joins_qkv: bool = True
    """Query, key and value go through one all-to-all, not three."""
    offloads_optimizer: bool = False
    """Masters, Adam's states and gradient sums are in host memory (ZeRO-3)."""
    shards_optimizer_over_dp: bool = False
    """Masters and Adam's states are cut over the replicas too (ZeRO-3)."""
    loss_block_tokens: int = 1024
    """Tokens of a rank whose logits exist at a time on the last stage."""
    keeps_gathered: bool = False
    """A stage gathers each layer's parameters once a step and releases them at its end (ZeRO-3),
    instead of for every chunk. The planner decides it; a plan's setup says what it decided."""

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 3):
            raise ConfigError(
                f"ZeRO stage {self.zero_stage} is not supported inside a stage: use 0 or 3"
            )
        for name in ("dtype_bytes", "loss_block_tokens"):
            _check_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Setup:
    """What a batch is planned for; equal setups are equal keys. Raises ConfigError like Execution.

    `limit_bytes` is the memory a plan may use on one device. Slice boundaries inside a cut sequence
    are multiples of `unit` tokens, the least common multiple of sp and `alignment`.
    """

    model: ModelSpec
    cluster: ClusterSpec
    layout: Layout
    execution: Execution
    limit_bytes: int
    alignment: int = 1

    def __post_init__(self) -> None:
        for name in ("limit_bytes", "alignment"):
            _check_positive(name, getattr(self, name))

    @property
    def unit(self) -> int:
        return math.lcm(self.layout.sp, self.alignment)

    @property
    def gathers_parameters(self) -> bool:
        """True where parameters are gathered at all: ZeRO-3 over several ranks of a stage."""
        return self.execution.zero_stage == 3 and self.layout.sp > 1

    def run_with(self, **changes: Any) -> Setup:
        """The same with some fields of `execution` changed."""
        return replace(self, execution=replace(self.execution, **changes))

    def to_json(self) -> dict[str, Any]:
        """An object of JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Setup:
        """Inverse of `to_json`. KeyError or TypeError for missing or foreign keys."""
        layout = {**data["layout"], "stage_layers": tuple(data["layout"]["stage_layers"])}
        parts = {
            "model": ModelSpec(**data["model"]),
            "cluster": ClusterSpec(**data["cluster"]),
            "layout": Layout(**layout),
            "execution": Execution(**data["execution"]),
        }
        return cls(**{**data, **parts})


def make_setup(
    model: ModelSpec,
    cluster: ClusterSpec,
    layout: Layout,
    execution: Execution | None = None,
    *,
    memory_limit_gib: float | None = None,
    alignment: int = 1,
) -> Setup:
    """A setup with defaults: bf16 under ZeRO-3, within all of the cluster's memory.

    Built-in models have fused kernels, as in the paper; others the plain layers that training here
    has. Raises ConfigError for an alignment or a limit below 1.
    """
    if execution is None:
        execution = Execution(fused_kernels=model == BUILTIN_MODELS.get(model.name))
    limit_bytes = cluster.memory_bytes
    if memory_limit_gib is not None:
        limit_bytes = int(memory_limit_gib * _GIB)
    return Setup(model, cluster, layout, execution, limit_bytes, alignment)


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


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")
