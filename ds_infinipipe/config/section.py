"""The strict `"infinipipe"` section of the DeepSpeed JSON.

Every field states its unit and default; unknown keys fail; "auto" means "derived from the rest".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_infinipipe.config.deepspeed import (
    SECTION,
    derive_deepspeed_settings,
    offloads_optimizer,
    read_deepspeed_json,
    refuse_misspelt_keys,
    sequences_per_step,
)
from ds_infinipipe.config.findings import describe_findings
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.json_file import read_json_object
from ds_infinipipe.planner.facts.clusters import ClusterSpec, load_cluster
from ds_infinipipe.planner.facts.models import ModelSpec, model_from_hf
from ds_infinipipe.planner.facts.settings import PlannerSection
from ds_infinipipe.planner.facts.setup import Execution

__all__ = [
    "CheckpointSettings",
    "ClusterSpec",
    "DataSettings",
    "DebugSettings",
    "InfiniPipeConfig",
    "ModelSettings",
    "ParallelSettings",
    "PlanningSettings",
    "RecoverySettings",
    "RuntimeSettings",
    "TrainingSettings",
    "derive_deepspeed_config",
    "sequences_per_step",
]

_Degree = Annotated[int, Field(ge=1, lt=2**31)]
_MAX_WAIT_S = 1e7
_Paths = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class ModelSettings(_Section):
    """Where the model comes from: at most one of `path`, `config` and `config_path`."""

    path: str | None = None
    """Hugging Face folder with config.json and safetensors; its weights are loaded."""

    config: dict[str, Any] | None = None
    """Hugging Face config as an object, with model_type; weights are initialised at random."""

    config_path: str | None = None
    """A config.json, or a folder that holds one; weights are initialised at random."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the random weights; equal for every layout. Default 0."""

    kernels: Literal["auto", "liger", "torch"] = "auto"
    """Whose RMSNorm, rotary embedding and SwiGLU run: Liger's fused ones, which keep fewer
    activations, or transformers' in torch. "auto" (default): Liger's on CUDA if installed."""

    fp8: Literal["off", "tensor", "row"] = "off"
    """FP8 products in the decoder layers' projections, with one scale for a `tensor` or for each
    `row`; needs bf16 training. Default "off"."""

    compile: bool = False
    """Run decoder layers through torch.compile, for chunks of any length; the first steps take
    minutes. Default false."""

    @model_validator(mode="after")
    def _one_kernel(self) -> ModelSettings:
        if self.compile and self.kernels == "liger":
            raise ValueError("compile and kernels liger exclude each other; keep one")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        given = [n for n in ("path", "config", "config_path") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one")
        return self

    def load_hf_config(self) -> dict[str, Any]:
        """The Hugging Face config as a dictionary of its own; ConfigError if none can be read."""
        if self.config is not None:
            return dict(self.config)
        source = self.path if self.path is not None else self.config_path
        if source is None:
            raise ConfigError(
                "no model: give infinipipe.model.path (a Hugging Face folder), "
                "infinipipe.model.config (its config) or infinipipe.model.config_path"
            )
        file = Path(source)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise ConfigError(f"the model config {file} does not exist")
        return read_json_object(file, "the model config")

    def load_spec(self) -> ModelSpec:
        """What the planner needs of the model; ConfigError for an unsupported one."""
        return model_from_hf(self.load_hf_config())


class ParallelSettings(_Section):
    """Parallel degrees; pp * sp * dp ranks run together."""

    pp: _Degree = 1
    """Pipeline stages. Default 1."""

    sp: _Degree | Literal["auto"] = "auto"
    """Ulysses sequence-parallel ranks in a stage; "auto" (default) takes world size / pp."""

    dp: _Degree = 1
    """Data-parallel replicas, each with a plan of its own. Default 1."""

    shard_optimizer_over_dp: bool = False
    """Each replica keeps masters and Adam's states of 1/dp of its ZeRO-3 partition; weights are
    gathered over the replicas once a step. Default false."""

    def resolve(self, world_size: int) -> tuple[int, int, int]:
        """(pp, sp, dp) for that many ranks; ConfigError where the product differs."""
        sp = max(1, world_size // (self.pp * self.dp)) if self.sp == "auto" else self.sp
        ranks = self.pp * sp * self.dp
        if ranks != world_size:
            raise ConfigError(
                f"infinipipe.parallel: pp {self.pp} x sp {sp} x dp {self.dp} = {ranks} ranks, but "
                f"{world_size} were started: start {ranks} ranks or choose degrees whose product "
                f"is {world_size}"
            )
        return self.pp, sp, self.dp


class PlanningSettings(_Section):
    """How planning runs beside training."""

    asynchronous: bool = True
    """Solve the next step's plan in a worker process while the current one trains. Default true."""

    deadline_s: float = Field(default=30.0, gt=0.0, allow_inf_nan=False)
    """Seconds a step waits for a late plan before a greedy one replaces it. Default 30."""


class DataSettings(_Section):
    """The documents that are trained on, and what happens to those that do not fit."""

    path: str | _Paths = "python-sources"
    """File or folder, or a list of them; "python-sources" (default) is the running interpreter's
    standard library and installed packages."""

    format: Literal["auto", "text", "jsonl"] = "auto"
    """`text`: a file is a document; `jsonl`: a line is one; `auto` (default): by file suffix."""

    text_field: str = "text"
    """JSONL key with the text; a line may have `input_ids` instead, and `labels` beside them: as
    long, not shifted, -100 where there is none. Default "text"."""

    patterns: Literal["auto"] | _Paths = "auto"
    """Shell patterns of the file names read from a folder; "auto" (default): text and code."""

    tokenizer: Literal["bytes"] = "bytes"
    """`bytes`: 256 byte values and three special tokens; nothing to download."""

    context_length: int = Field(default=4096, ge=2)
    """Most tokens of one training sequence. Default 4096."""

    over_length: Literal["error", "truncate", "split", "drop"] = "error"
    """What happens to a longer document: an error (default), its head kept, cut into sequences of
    their own, or left out. The report counts it."""

    encoding_errors: Literal["replace", "strict"] = "replace"
    """Bytes that are not UTF-8: replaced (default), or an error naming file and byte."""

    max_documents: _Degree | None = None
    """Cap on documents read; which ones is decided by `seed` and file name. Default: no cap."""

    shuffle: bool = True
    """Draw sequences in random order, anew each epoch. Default true."""

    drop_last: bool = False
    """Leave out an epoch's last, smaller batch. Default false: it is trained on."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the order and of the choice under `max_documents`. Default 0."""


class TrainingSettings(_Section):
    """The loop of `infinipipe train`."""

    steps: _Degree = 100
    """Optimizer steps. Default 100."""

    log_every: _Degree = 1
    """Steps between two log lines. Default 1."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradients are not finite ends the run (default) or is skipped."""

    failure_dir: str = "failed-steps"
    """Folder that receives such a step for `infinipipe replay`. Default "failed-steps"."""


class CheckpointSettings(_Section):
    """Saving and resuming. What `save_dir` and the two after it ask for, `infinipipe train` does;
    the others also hold for the engine's `save_checkpoint` and `load_checkpoint`."""

    save_dir: str | None = None
    """Folder of the checkpoints, shared by all nodes. Default: nothing is saved."""

    every_steps: _Degree | None = None
    """Steps between two checkpoints; the last step is always saved. Default: only that."""

    resume: str | None = "auto"
    """Where training goes on: "auto" (default), the latest checkpoint in `save_dir` if there is
    one; a checkpoint's folder, or one that holds some; or null, at the start."""

    keep_last: _Degree | None = None
    """Checkpoints named by step that are kept, the youngest; other tags stay. Default: all."""

    asynchronous: bool = False
    """Copy the states to host memory and write them beside training. Default false."""

    verify: bool = True
    """Compare checksums when loading, which reads every file once. Default true."""

    restore_data: bool = True
    """Go on in the data where the checkpoint was taken; false starts at its beginning, as is
    needed with another data set or batch size. Default true."""

    @model_validator(mode="after")
    def _has_a_place(self) -> CheckpointSettings:
        if self.save_dir is None and self.every_steps is not None:
            raise ValueError("every_steps needs save_dir, the folder to save to")
        return self


class RuntimeSettings(_Section):
    """How a plan is executed."""

    attention: str = "auto"
    """Attention backend by name; "auto" (default) takes the fastest that works on the device."""

    cross_entropy: str = "auto"
    """Cross-entropy backend by name: `torch` or `triton`, which needs a CUDA device; "auto"
    (default) takes the fastest that works on the device."""

    all_to_all: Literal["fused", "separate"] = "fused"
    """Query, key and value in one all-to-all (default), or in three, which copies less."""

    deterministic: bool = False
    """Kernels that add up in one order, torch's and flash-attn's backward, at some cost in speed:
    on GPUs a step is then equal bit for bit when it is run again. CPUs always do. Default false."""

    timeout_s: float = Field(default=600.0, ge=1.0, le=_MAX_WAIT_S, allow_inf_nan=False)
    """Seconds to wait for a peer before the step fails, naming chunk and peer; more than
    planning.deadline_s, during which peers wait for a plan. Default 600."""

    watchdog_s: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """Seconds at one instruction after which a rank says where it stalls. Default 60."""


class RecoverySettings(_Section):
    """What is left for the next start when a rank runs out of memory and the run ends."""

    enabled: bool = True
    """Store a lower memory limit beside the checkpoints, and plan within one that is stored there.
    Default true."""

    reduction: float = Field(default=0.85, gt=0.0, lt=1.0)
    """The lower limit, as a share of the peak predicted where memory ran out. Plans keep to it but
    for a batch that does not fit in it. Default 0.85."""

    max_lowerings: int = Field(default=3, ge=1, le=100)
    """Lower limits in a row without getting past the step; a start after one more is refused.
    Default 3."""


class DebugSettings(_Section):
    """What helps to find a fault; all off by default."""

    verify_p2p: bool = False
    """Compare a checksum of every transfer on both sides."""

    synchronous: bool = False
    """Nothing runs ahead or beside: parameters are gathered, tensors received and gradients summed
    when they are due, and the host waits for the device after every instruction. Results are equal
    bit for bit; what goes wrong is reported where it happens."""

    dump_plans: str | None = None
    """Folder that receives every step, plan and batch, for `infinipipe replay`."""

    trace: str | None = None
    """Folder that receives a Chrome trace of the measured steps."""

    meter_memory: bool = False
    """Count live tensor bytes of every step on CPU ranks, for the report's measured peaks; small
    steps take twice as long. On CUDA the allocator always counts."""


class InfiniPipeConfig(_Section):
    """The whole `"infinipipe"` section."""

    model: ModelSettings = ModelSettings()
    parallel: ParallelSettings = ParallelSettings()
    cluster: str = "cpu-local"
    """Built-in cluster name or a JSON file with its constants. Default "cpu-local"."""

    planner: PlannerSection = PlannerSection()
    planning: PlanningSettings = PlanningSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    recovery: RecoverySettings = RecoverySettings()
    debug: DebugSettings = DebugSettings()

    @model_validator(mode="after")
    def _waits_for_plans(self) -> InfiniPipeConfig:
        timeout_s, deadline_s = self.runtime.timeout_s, self.planning.deadline_s
        if timeout_s <= deadline_s:
            raise ValueError(
                f"runtime.timeout_s is {timeout_s:g} and planning.deadline_s {deadline_s:g}: peers "
                "wait while a late plan is made, so raise the first or lower the second"
            )
        return self

    @classmethod
    def from_deepspeed(cls, source: str | Path | Mapping[str, Any]) -> InfiniPipeConfig:
        """The section of a DeepSpeed JSON, given as a file or as a dictionary.

        An absent section means all defaults. Raises ConfigError naming field, value and repair,
        also for a misspelt top-level key of the rest.
        """
        config = read_deepspeed_json(source)
        refuse_misspelt_keys(config)
        return cls.from_section(config.get(SECTION, {}))

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> InfiniPipeConfig:
        """Validate the section alone; raises ConfigError."""
        if not isinstance(section, Mapping):
            raise ConfigError(f"{SECTION} is {section!r}; it must be an object")
        try:
            return cls.model_validate(dict(section))
        except ValidationError as error:
            raise ConfigError(describe_findings(error, cls, SECTION)) from error

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of the section, with every field's docstring as its description."""
        return cls.model_json_schema()

    def load_cluster(self) -> ClusterSpec:
        """The cluster named by `cluster`; raises ConfigError if there is none."""
        return load_cluster(self.cluster)

    def execution(
        self, deepspeed: Mapping[str, Any], dtype_bytes: int, kernels: str | None = None
    ) -> Execution:
        """How a run with this section in the DeepSpeed JSON `deepspeed` executes its model.

        `kernels` are those chosen. Without them, where `model.kernels` is "auto", the activations
        of torch's layers are counted, the larger ones.
        """
        return Execution(
            zero_stage=int(deepspeed.get("zero_optimization", {}).get("stage", 0)),
            dtype_bytes=dtype_bytes,
            fused_kernels=(kernels or self.model.kernels) == "liger",
            fp8=self.model.fp8 != "off",
            joins_qkv=self.runtime.all_to_all == "fused",
            offloads_optimizer=offloads_optimizer(deepspeed),
            shards_optimizer_over_dp=self.parallel.shard_optimizer_over_dp,
        )


def derive_deepspeed_config(
    config: str | Path | Mapping[str, Any], world_size: int
) -> dict[str, Any]:
    """The dictionary to give to DeepSpeed for `world_size` ranks.

    `train_batch_size` of the user's file counts sequences per optimizer step; DeepSpeed's own
    identity train_batch = micro * accumulation * data-parallel size is met with micro = 1 and
    accumulation = 1, and ours stays available from `sequences_per_step`. Raises ConfigError for
    settings that cannot work and where pp * sp * dp is not the world size.
    """
    whole = read_deepspeed_json(config)
    section = InfiniPipeConfig.from_section(whole.get(SECTION, {}))
    _, sp, _ = section.parallel.resolve(world_size)
    derived = derive_deepspeed_settings(whole, shards=sp)
    stage = derived["zero_optimization"]["stage"]
    if section.parallel.shard_optimizer_over_dp and stage != 3:
        raise ConfigError(
            "infinipipe.parallel.shard_optimizer_over_dp cuts ZeRO-3's partitions, but "
            f"zero_optimization.stage is {stage}: set the stage to 3, or the option to false"
        )
    return derived
