"""The private DeepSpeed surface this package touches, asserted and adapted in one place.

DeepSpeed promises nothing about these names, so `check_surface` compares them with what the
installed version has before any engine is built, and the error names the version.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from packaging.version import Version
from torch.distributed import distributed_c10d

from ds_infinipipe.errors import ConfigError

__all__ = [
    "SUPPORTED_DEEPSPEED",
    "SUPPORTED_TORCH",
    "check_surface",
    "check_zero3_optimizer",
    "compile_late",
    "count_devices_once",
    "gradient_partition",
    "lifted_refusals",
    "reduce_pending_gradients",
    "replace_partitions",
    "skip_shared_memory_build",
]

SUPPORTED_DEEPSPEED = ("0.19.8", "0.20")
SUPPORTED_TORCH = ("2.11", "2.14")

# class or module -> names used by this package and not part of DeepSpeed's public interface
_CLASS_SURFACE: dict[Any, tuple[str, ...]] = {
    PipelineEngine: (
        "_INSTRUCTION_MAP",
        "_aggregate_total_loss",
        "_configure_bf16_optimizer",
        "_configure_fp16_optimizer",
        "_exec_optimizer_step",
        "_exec_schedule",
        "_get_optimizer_loss_scale",
        "_take_model_step",
        "_train_schedule",
        "clip_fp32_gradients",
    ),
    PipelineModule: ("_build", "_partition_layers", "_set_bounds"),
    DeepSpeedZeroOptimizer_Stage3: (
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        "_get_fp32_grad_state_partition",
        "_get_fp32_opt_state_partition",
        "_optimizer_step",
        "_pre_step",
        "_reassign_or_swap_out_partitioned_parameters",
        "independent_gradient_partition_epilogue",
        "override_loss_scale",
        "reduce_ready_partitions_and_remove_grads",
        "set_gradient_accumulation_boundary",
    ),
    DeepSpeedZeRoOffload: ("_remove_module_hooks",),
    pipe_engine: ("ZeroStageEnum",),
    compiler: ("compile",),
    type(get_accelerator()): ("is_fp16_supported",),
    partition_parameters: ("ZeroParamStatus", "GatheredParameters"),
}

_TORCH_SURFACE: dict[Any, tuple[str, ...]] = {
    distributed_c10d: ("_get_default_store", "_world"),
    distributed_c10d.ProcessGroup: (
        "_device_types",
        "_get_backend",
        "abort",
        "bound_device_id",
    ),
    torch._C: ("_accelerator_setAllocatorSettings",),
    distributed_c10d.PrefixStore: ("_underlying_non_prefix_store", "clone"),
}

_OPTIMIZER_ATTRIBUTES = (
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
    "_epilogue_ran_this_backward",
    "_grad_acc_hooks",
    "_leaf_module_hooks",
    "fp16_groups",
    "fp16_partitioned_groups_flat",
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
    "ipg_buckets",
    "micro_step_id",
    "lp_param_buffer",
    "offload_optimizer",
    "offload_optimizer_pin_memory",
    "overflow",
    "parameter_offload",
    "persistent_parameters",
    "reduce_and_partition_stream",
    "sub_group_to_group_id",
)


@functools.cache
def check_surface() -> None:
    """Raise ConfigError where torch or DeepSpeed is out of range or lacks a name we rely on."""
    _check_version("deepspeed", deepspeed.__version__, SUPPORTED_DEEPSPEED)
    _check_version("torch", torch.__version__, SUPPORTED_TORCH)
    _refuse_missing(_missing(_CLASS_SURFACE))
    _refuse_missing(_missing(_TORCH_SURFACE), "torch", torch.__version__, SUPPORTED_TORCH)


def check_zero3_optimizer(optimizer: Any) -> None:
    """Raise ConfigError where a built stage-3 optimizer lacks what the sharding driver uses.

    Also asserts DeepSpeed's memory-saving `linear`: the plain one saves an alias of the gathered
    weight for backward, so that every chunk in flight would pin a full copy of the layer.
    """
    _refuse_missing(
        [
            f"stage-3 optimizer.{name}"
            for name in _OPTIMIZER_ATTRIBUTES
            if not hasattr(optimizer, name)
        ]
    )
    installed = torch.nn.functional.linear
    if getattr(installed, "__name__", "") != "zero3_linear_wrap":
        raise ConfigError(
            f"torch.nn.functional.linear is {installed!r}, not DeepSpeed's zero3_linear_wrap: each "
            "chunk in flight would keep gathered weights alive; remove 'memory_efficient_linear': "
            "false from zero_optimization, or whatever replaced the function"
        )


def gradient_partition(optimizer: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter's gradient, `[ceil(numel / shards)]`, where steps add it up.

    A view of `grad_partitions_flat_buffer`.
    """
    partitions = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    partition: torch.Tensor = partitions[parameter.ds_id]  # type: ignore[attr-defined]
    return partition


def replace_partitions(
    optimizer: Any, places: dict[torch.nn.Parameter, int], total: int
) -> torch.Tensor:
    """Lay the trained weights' partitions and gradients out anew, in flat buffers of `total`.

    `places` are the starts in both. Returns the weights' buffer; where no partition lies it is
    zero, as is all of `grad_partitions_flat_buffer`.
    """
    some = next(iter(places)).ds_tensor  # type: ignore[attr-defined]
    weights = torch.zeros(total, dtype=some.dtype, device=some.device)
    for parameter, start in places.items():
        partition = parameter.ds_tensor  # type: ignore[attr-defined]
        place = weights.narrow(0, start, partition.ds_numel)
        place.copy_(partition.data)
        partition.data = place
    optimizer.lp_param_buffer = weights
    optimizer.fp16_partitioned_groups_flat.clear()
    partitions = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    partitions.clear()
    old = optimizer.grad_partitions_flat_buffer
    optimizer.grad_partitions_flat_buffer = None
    dtype, device = old.dtype, old.device
    del old
    gradients = torch.zeros(total, dtype=dtype, device=device)
    if optimizer.offload_optimizer_pin_memory:
        gradients = get_accelerator().pin_memory(gradients)
    optimizer.grad_partitions_flat_buffer = gradients
    for parameter, start in places.items():
        count = parameter.partition_numel()  # type: ignore[attr-defined]
        partitions[parameter.ds_id] = gradients.narrow(0, start, count)  # type: ignore[attr-defined]
    return weights


def reduce_pending_gradients(optimizer: Any) -> None:
    """Reduce what is in the stage-3 optimizer's buckets, without waiting for it on the host."""
    for dtype in sorted(optimizer.ipg_buckets, key=str):
        optimizer._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)


def _check_version(package: str, version: str, supported: tuple[str, str]) -> None:
    low, high = supported
    if not Version(low) <= Version(Version(version).base_version) < Version(high):
        raise ConfigError(
            f"{package} {version} is installed, ds_infinipipe needs >= {low} and < {high}: "
            f"pip install '{package}>={low},<{high}'"
        )


def _missing(surface: dict[Any, tuple[str, ...]]) -> list[str]:
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in surface.items()
        for name in names
        if not hasattr(owner, name)
    ]


def _refuse_missing(
    missing: list[str],
    package: str = "deepspeed",
    version: str = deepspeed.__version__,
    supported: tuple[str, str] = SUPPORTED_DEEPSPEED,
) -> None:
    if missing:
        raise ConfigError(
            f"{package} {version} lacks {', '.join(missing)}, which ds_infinipipe builds on; use "
            f"{package} >= {supported[0]}, < {supported[1]}"
        )


@contextlib.contextmanager
def lifted_refusals() -> Iterator[None]:
    """Lift what DeepSpeed refuses for no reason that holds here, while an engine is constructed.

    * ZeRO-2/3 with pipelines: PipelineEngine reads the module-global `ZeroStageEnum` once, in that
      assertion. It refuses because hooks would repeat the collectives per micro-batch and lose
      gradients; our sharding driver removes those hooks and places every collective itself.
    * fp16 on a CPU without fp16 arithmetic, where torch computes it all the same, slowly: that
      serves to check on a laptop what a GPU will do.
    """
    original = pipe_engine.ZeroStageEnum
    pipe_engine.ZeroStageEnum = SimpleNamespace(gradients=original.max_stage + 1)
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        pipe_engine.ZeroStageEnum = original
        vars(accelerator).pop("is_fp16_supported", None)


def skip_shared_memory_build() -> None:
    """On a CPU keep `init_distributed` from compiling DeepSpeed's shared-memory all-reduce.

    Only inference uses it. Building takes minutes, a killed build leaves a lock that hangs every
    later run, and under the deepspeed launcher it leaves 69 MB per rank in shared memory. The
    module must be looked up in sys.modules: its attribute on the package is torch itself.
    """
    if get_accelerator().device_name() == "cpu":
        import deepspeed.comm.torch  # noqa: F401

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def count_devices_once() -> None:
    """On a CPU tell DeepSpeed how many devices the node has, one a rank.

    It would start a program to find out for each gradient bucket it reduces.
    """
    if get_accelerator().device_name() == "cpu":
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))


def compile_late() -> None:
    """Let DeepSpeed compile what it decorates when that is called, not when it is imported.

    That is Muon's arithmetic, which every ZeRO optimizer imports and no run of ours calls: ranks
    would load torch's compiler for it at their start.
    """
    compiler.compile = lambda: _compiled_when_called


def _compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
