"""A Hugging Face decoder as a PipelineModule: one stage per node, sharded inside the stage."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_infinipipe.config.deepspeed import (
    read_deepspeed_json,
    warn_unknown_keys,
)
from ds_infinipipe.config.section import InfiniPipeConfig, derive_deepspeed_config
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.model.compiling import check_compiling
from ds_infinipipe.model.hf import load_hf_config, sliding_window
from ds_infinipipe.model.layers import (
    EMBEDDING_NAME,
    DecoderLayer,
    EmbeddingLayer,
    HeadLayer,
    hf_names,
)
from ds_infinipipe.model.liger import resolve_kernels, use_kernels
from ds_infinipipe.model.protocol import OwnLayers
from ds_infinipipe.model.weights import check_weights, init_parameter, load_weights
from ds_infinipipe.ops.attention import check_alignment, resolve_attention
from ds_infinipipe.ops.cross_entropy import resolve_cross_entropy
from ds_infinipipe.ops.fp8 import check_fp8
from ds_infinipipe.planner.facts.settings import PlannerSection
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.runtime.ranks.agree import check_same_config, raise_together, refusing
from ds_infinipipe.runtime.ranks.connections import take_device, wake_others
from ds_infinipipe.runtime.ranks.faults import naming_peer_failures
from ds_infinipipe.runtime.ranks.grid import InfiniPipeGrid, adopt_grid
from ds_infinipipe.runtime.ranks.last_words import LastWords
from ds_infinipipe.runtime.ranks.rendezvous import JOINING_METHOD, choose_gloo_interface
from ds_infinipipe.runtime.ranks.store import Board
from ds_infinipipe.runtime.ranks.surface import (
    check_surface,
    compile_late,
    count_devices_once,
    skip_shared_memory_build,
)

__all__ = ["InfiniPipeModule", "choose_kernels", "init_distributed"]

logger = logging.getLogger(__name__)


def init_distributed(timeout_s: float) -> None:
    """Join the process group of the launcher, each operation on it limited to `timeout_s`."""
    check_surface()
    skip_shared_memory_build()
    compile_late()
    count_devices_once()
    # NCCL's watchdog would end the process before it could say what failed;
    # 2 is "abort the communicators"
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    # DeepSpeed calls collectives by names that torch has begun to rename
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    take_device()
    choose_gloo_interface()
    with naming_peer_failures("joining the process group"):
        deepspeed.init_distributed(
            timeout=timedelta(seconds=timeout_s), verbose=False, init_method=JOINING_METHOD
        )
    if dist.get_world_size() > 1:
        notes = Board("infinipipe/end", timeout_s)
        sys.excepthook = LastWords(notes, dist.get_rank(), dist.get_world_size(), wake_others)


class InfiniPipeModule(PipelineModule):
    """Stage `s` of the model on every rank of stage `s`.

    `config` is the DeepSpeed JSON (path or dictionary) with its `"infinipipe"` section, which names
    the model and the layout. Layer 0 is the embedding, then the decoder layers, then the head
    (final norm, lm_head and loss). `dtype` overrides the training dtype for exactness checks;
    float64 needs ZeRO stage 0. `layers` replaces the Hugging Face layers, see `model.protocol`.
    Raises ConfigError on every rank where model and layout do not fit.
    """

    _grid: InfiniPipeGrid

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        *,
        dtype: torch.dtype | None = None,
        layers: OwnLayers | None = None,
    ) -> None:
        self.settings = InfiniPipeConfig.from_deepspeed(config)
        init_distributed(self.settings.runtime.timeout_s)
        whole = read_deepspeed_json(config)
        check_same_config(whole)
        if dist.get_rank() == 0:
            warn_unknown_keys(whole)
        world_size = dist.get_world_size()
        self.deepspeed_config = derive_deepspeed_config(whole, world_size)
        self.zero_stage = int(self.deepspeed_config["zero_optimization"]["stage"])
        self.dtype = _training_dtype(self.deepspeed_config, self.zero_stage, dtype)
        self.hf_config = load_hf_config(self.settings.model.load_hf_config())
        self.kernels = self._choose_kernels()
        self.spec = self.settings.model.load_spec()
        pp, sp, dp = self.settings.parallel.resolve(world_size)
        self.layout = make_layout(self.spec, pp, sp, dp)
        self._has_own_layers = layers is not None
        self.planner_settings = self._choose_planner_settings()
        self.setup = self.planner_settings.setup(
            self.spec,
            self.settings.load_cluster(),
            self.layout,
            self.settings.execution(self.deepspeed_config, self.dtype.itemsize, self.kernels),
        )
        specs = self._hf_specs() if layers is None else self._own_specs(layers)
        topology = ProcessTopology(axes=["replica", "pipe", "data"], dims=[dp, pp, sp])
        # the base class prints its partition
        with refusing("building the model"), contextlib.redirect_stdout(io.StringIO()):
            super().__init__(specs, topology=topology)
        self._mark_parameters()
        self._fill_parameters()

    def _hf_specs(self) -> list[LayerSpec]:
        model, runtime = self.settings.model, self.settings.runtime
        decoders = [
            LayerSpec(DecoderLayer, self.hf_config, i, fp8=model.fp8, compiled=model.compile)
            for i in range(self.spec.num_layers)
        ]
        head = LayerSpec(HeadLayer, self.hf_config, runtime.cross_entropy)
        return [LayerSpec(EmbeddingLayer, self.hf_config), *decoders, head]

    def _own_specs(self, layers: OwnLayers) -> list[LayerSpec]:
        model = self.settings.model
        if model.fp8 != "off" or model.compile:
            raise ConfigError(
                f"infinipipe.model.fp8 is {model.fp8!r} and compile {model.compile}, which change "
                "the Hugging Face layers: leave both off with layers of your own"
            )
        decoders = [
            _OwnSpec(layers.make_decoder, self.hf_config, i) for i in range(self.spec.num_layers)
        ]
        embedding = _OwnSpec(layers.make_embedding, self.hf_config)
        specs = [embedding, *decoders, _OwnSpec(layers.make_head, self.hf_config)]
        # one of each on every rank, without memory: peers of a stage that fails alone would wait
        with torch.device("meta"):
            for spec in (specs[0], specs[1], specs[-1]):
                spec.build()
        return specs

    def _choose_kernels(self) -> str:
        model = self.settings.model
        # a compiled layer has its own fused norm, rotary embedding and SwiGLU
        wanted = "torch" if model.compile else model.kernels
        device_type = get_accelerator().device_name()
        kernels = resolve_kernels(wanted, self.hf_config, device_type, self.dtype)
        use_kernels(self.hf_config, kernels)
        return kernels

    def _whole_backwards(self) -> str | None:
        """What keeps layers from leaving their weights' gradients for later, None if nothing."""
        model = self.settings.model
        if self._has_own_layers:
            return "the layers are the caller's own"
        if model.fp8 != "off":
            return f"infinipipe.model.fp8 is {model.fp8!r}"
        return "infinipipe.model.compile is true" if model.compile else None

    def _choose_planner_settings(self) -> PlannerSection:
        """The planner's settings; only our own projections can leave their weights for later."""
        planner, reason = self.settings.planner, self._whole_backwards()
        if reason is None or planner.split_backward == "never":
            return planner
        if dist.get_rank() == 0 and planner.mode == "lean" and self.layout.pp > 1:
            is_explicit = "split_backward" in planner.model_fields_set
            logger.log(
                logging.WARNING if is_explicit else logging.INFO,
                "%s, so no plan splits backwards, though infinipipe.planner.split_backward is %r%s",
                reason,
                planner.split_backward,
                ': set it to "never", or change the former' if is_explicit else "",
            )
        return planner.model_copy(update={"split_backward": "never"})

    @property
    def grid(self) -> InfiniPipeGrid:
        return self._grid

    @property
    def is_tied_across_stages(self) -> bool:
        """True when embedding and head are two copies of one weight on different stages."""
        return self.spec.tied_embeddings and self.layout.pp > 1

    @property
    def tied_parameter(self) -> torch.nn.Parameter | None:
        """This stage's copy of a weight tied across stages, if it has one."""
        if not self.is_tied_across_stages:
            return None
        for layer in self.forward_funcs:
            if isinstance(layer, EmbeddingLayer):
                return layer.embed_tokens.weight  # type: ignore[return-value]
            if isinstance(layer, HeadLayer):
                return layer.lm_head.weight  # type: ignore[return-value]
        return None

    def hf_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This stage's parameters under their names in a Hugging Face checkpoint."""
        seen = set()
        for layer in self.forward_funcs:
            for name, parameter in _named(layer).items():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def _partition_layers(self, method: str = "uniform") -> None:
        """Bounds from the layout; the embedding is on the first stage, the head on the last."""
        counts = list(self.layout.stage_layers)
        counts[0] += 1
        counts[-1] += 1
        self.parts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        stage = self._grid.get_stage_id()
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _build(self) -> None:
        timeout = timedelta(seconds=self.settings.runtime.timeout_s)
        self._grid = adopt_grid(self._grid, self.layout.sp, timeout)
        with _default_dtype(self.dtype), self._sharded_construction():
            super()._build()
        if self.spec.tied_embeddings and self.layout.pp == 1:
            self.forward_funcs[-1].lm_head.weight = self.forward_funcs[0].embed_tokens.weight

    def _sharded_construction(self) -> contextlib.AbstractContextManager[Any]:
        if self.zero_stage != 3:
            return contextlib.nullcontext()
        return deepspeed.zero.Init(
            data_parallel_group=self._grid.get_data_parallel_group(),
            config_dict_or_path=self.deepspeed_config,
            mpu=self._grid,
        )

    def _mark_parameters(self) -> None:
        """Make every stage's parameters count in the gradient norm, a tied weight only once.

        DeepSpeed counts a parameter on model-parallel rank 0 only unless it is marked; here that
        group is the pipeline column, whose ranks hold different parameters.
        """
        second_copy = self.tied_parameter if self._grid.is_last_stage else None
        for parameter in self.parameters():
            parameter.model_parallel = parameter is not second_copy

    def _fill_parameters(self) -> None:
        """Weights from the folder, or random ones that depend only on name and seed."""
        folder = self.settings.model.path
        if folder is not None:
            wanted = {name: _full_shape(p) for name, p in self.hf_parameters()}
            with raise_together(f"loading {folder}"):
                check_weights(folder, wanted)
        for layer in self.forward_funcs:
            named = _named(layer)
            with self._writable(list(named.values())) as is_writer:
                if is_writer:
                    self._fill_layer(folder, named)
        if folder is not None:
            with raise_together(f"loading {folder}"):
                self._check_finite(folder)

    def _check_finite(self, folder: str) -> None:
        bad = [
            name
            for name, parameter in self.hf_parameters()
            if not getattr(parameter, "ds_tensor", parameter.data).isfinite().all()
        ]
        if bad:
            raise ConfigError(
                f"{folder} has values that are not finite numbers in {', '.join(bad[:5])}: "
                "the checkpoint is damaged, download or save it again"
            )

    @contextlib.contextmanager
    def _writable(self, parameters: list[torch.nn.Parameter]) -> Iterator[bool]:
        """Parameters as whole tensors; True on the ranks whose writes are kept."""
        if self.zero_stage != 3:
            with torch.no_grad():
                yield True
            return
        # modifier_rank is a rank of the shard group, not of the world
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            yield self._grid.get_data_parallel_id() == 0

    def _fill_layer(self, folder: str | None, named: Mapping[str, torch.nn.Parameter]) -> None:
        if folder is None:
            for name, parameter in named.items():
                init_parameter(
                    name,
                    parameter.data,
                    seed=self.settings.model.seed,
                    std=self.hf_config.initializer_range,
                    zero_row=self.hf_config.pad_token_id if name == EMBEDDING_NAME else None,
                )
            return
        for name, tensor in load_weights(folder, {n: _full_shape(p) for n, p in named.items()}):
            named[name].data.copy_(tensor)


class _OwnSpec(LayerSpec):
    """A layer made by a function; DeepSpeed's own spec takes classes only."""

    def __init__(self, make: Callable[..., torch.nn.Module], *args: Any) -> None:
        super().__init__(torch.nn.Module, *args)
        self._make = make

    def build(self, log: bool = False) -> torch.nn.Module:
        return self._make(*self.module_args)


def _named(layer: Any) -> dict[str, torch.nn.Parameter]:
    names = hf_names(layer)
    return {names[name]: parameter for name, parameter in layer.named_parameters()}


def _full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _training_dtype(
    config: Mapping[str, Any], zero_stage: int, dtype: torch.dtype | None
) -> torch.dtype:
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    enabled = [half for name, half in halves.items() if config.get(name, {}).get("enabled")]
    chosen = dtype or (enabled[0] if enabled else torch.float32)
    for name, half in halves.items():
        if chosen == half and half not in enabled:
            raise ConfigError(
                f'dtype is {half}, but the configuration lacks "{name}": {{"enabled": true}}'
            )
    if zero_stage == 3 and chosen == torch.float64:
        raise ConfigError("float64 needs zero_optimization.stage 0: ZeRO-3 keeps fp32 masters")
    return chosen


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    # zero.Init converts to bf16 itself; building in float64 keeps every rotary table exact
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def choose_kernels(model: InfiniPipeModule, device: torch.device) -> str:
    """The name of the attention to use; raises ConfigError for kernels that cannot run here."""
    wanted = model.settings.runtime
    if wanted.deterministic:
        # what has no such kernel says so and runs; torch would also fill all memory it hands out
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
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
