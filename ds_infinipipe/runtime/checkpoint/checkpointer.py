"""Saving and loading what a run has become: weights, optimizer, schedule, counters, data."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ds_infinipipe.config.section import CheckpointSettings
from ds_infinipipe.errors import CheckpointError, ConfigError
from ds_infinipipe.model.hf import hf_class
from ds_infinipipe.runtime.checkpoint import folder
from ds_infinipipe.runtime.checkpoint.load import (
    check_files,
    fill_state,
    gather_shapes,
    read_extras,
)
from ds_infinipipe.runtime.checkpoint.manifest import Manifest, compare_parameters, read_manifest
from ds_infinipipe.runtime.checkpoint.save import CheckpointSaver, Contents, pack_extras
from ds_infinipipe.runtime.checkpoint.state import TrainingState, full_shape, make_state
from ds_infinipipe.runtime.ranks.agree import raise_together
from ds_infinipipe.runtime.ranks.rank import Rank
from ds_infinipipe.runtime.shards.replica_cut import ReplicaCut

__all__ = ["Checkpointer", "Counters", "DataPosition", "Trained"]

logger = logging.getLogger(__name__)

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# how an optimizer computes, not what
_KERNEL_CHOICES = frozenset({"capturable", "differentiable", "foreach", "fused"})
_NEUTRAL_CONFIG = frozenset({"architectures", "dtype", "transformers_version"})


class DataPosition(Protocol):
    """Where the training data stands."""

    @property
    def sampler(self) -> Any:
        """What draws the batches and can be restored; None where nothing can."""

    @property
    def num_ahead(self) -> int:
        """Batches that were read and not trained."""

    def forget(self) -> None:
        """Drop what was read ahead, because the data now stands elsewhere."""


@dataclass(frozen=True)
class Counters:
    """Steps and sequences since the run began."""

    global_steps: int
    global_samples: int
    skipped_steps: int


@dataclass(frozen=True)
class Trained:
    """What a checkpoint is of. `module` is an InfiniPipeModule, the others are DeepSpeed's.

    `cut` is how ZeRO-3's states are cut over the replicas, if they are.
    """

    module: Any
    optimizer: Any
    lr_scheduler: Any
    loss_scaler: Any
    cut: ReplicaCut | None
    data: DataPosition


class Checkpointer:
    """Saves and loads the state of a run; all but `close` are collectives."""

    def __init__(
        self,
        rank: Rank,
        settings: CheckpointSettings,
        trained: Trained,
        read_counters: Callable[[], Counters],
        set_counters: Callable[[Counters], None],
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._trained = trained
        self._read_counters = read_counters
        self._set_counters = set_counters
        self._saver = CheckpointSaver(
            asynchronous=settings.asynchronous, keep_last=settings.keep_last
        )

    @property
    def global_steps(self) -> int:
        """Steps trained so far."""
        return self._read_counters().global_steps

    def save(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        is_latest: bool = True,
    ) -> None:
        """Save under `save_dir/tag`, by default "global_step<N>".

        With `asynchronous` a copy is taken and written beside training, and what fails is raised by
        the next call here or by `close`. Raises CheckpointError on every rank where it cannot be
        written; older checkpoints stay untouched.
        """
        if not save_dir:
            raise ConfigError(f"save_dir is {save_dir!r}; give a folder that all nodes share")
        name = folder.step_tag(self.global_steps) if tag is None else str(tag)
        with raise_together("saving a checkpoint"):
            contents = self._contents(dict(client_state or {}))
        self._saver.save(Path(save_dir), name, contents, is_latest=is_latest)

    def load(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        with_optimizer: bool = True,
        with_schedule: bool = True,
        with_progress: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Load `load_dir/tag`, by default what `latest` names, saved at any layout.

        Without its parts the optimizer starts afresh, hyperparameters and schedule stay this run's,
        counters, loss scale and position in the data too. Returns the folder and the saved
        `client_state`. Raises CheckpointError for what is missing, damaged, foreign or another
        model's, and the sampler's ConfigError where it would draw other batches, before anything
        has changed.
        """
        self._saver.wait()
        where = f"loading a checkpoint from {load_dir}"
        with raise_together(where):
            place = folder.find_checkpoint(Path(load_dir), None if tag is None else str(tag))
            manifest = read_manifest(place)
        state = self.training_state()
        shapes = gather_shapes(self._full_shapes())
        with raise_together(where):
            compare_parameters(manifest.shapes, shapes, f"checkpoint {place}")
            extras = self._check(place, manifest, with_optimizer, with_schedule)
            if with_progress and self._settings.restore_data:
                self._restore_data(manifest)
        state.begin_load()
        with raise_together(where):
            fill_state(state, place, manifest, with_optimizer=with_optimizer)
        state.finish_load()
        if with_progress:
            self._restore_progress(manifest)
        if with_schedule:
            self._restore_schedule(manifest, extras)
        self._warn_of_changes(manifest)
        return str(place), extras["client_state"]

    def wait(self) -> None:
        """Wait until an asynchronous save is complete; raises what failed."""
        self._saver.wait()

    def close(self) -> None:
        """Wait without a collective, as peers may be gone; raises this rank's error."""
        self._saver.close()

    def training_state(self) -> TrainingState:
        """This rank's share of weights and optimizer states."""
        module, trained = self._trained.module, self._trained
        return make_state(module.hf_parameters(), trained.optimizer, module.zero_stage, trained.cut)

    # ---- saving

    def _full_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: full_shape(p) for name, p in self._trained.module.hf_parameters()}

    def _contents(self, client_state: dict[str, Any]) -> Contents:
        state = self.training_state()
        module, scheduler = self._trained.module, self._trained.lr_scheduler
        schedule = None if scheduler is None else scheduler.state_dict()
        # the last stage's copy of a tied weight equals the first stage's, which is saved
        copy = module.tied_parameter if self._rank.stage > 0 else None
        skipped = {name for name, p in module.hf_parameters() if p is copy}
        return Contents(
            part=(self._rank.stage, state.shard),
            shares=[s for s in state.shares() if s.name not in skipped],
            shapes={n: s for n, s in self._full_shapes().items() if n not in skipped},
            manifest=self._draft_manifest(),
            extras=pack_extras(client_state=client_state, lr_scheduler=schedule),
        )

    def _draft_manifest(self) -> Manifest:
        module = self._trained.module
        return Manifest(
            **asdict(self._read_counters()),
            saved_at=time.time(),
            dtype=str(module.dtype).removeprefix("torch."),
            layout={**asdict(module.layout), "zero_stage": module.zero_stage},
            model=self._model_config(),
            optimizer=_optimizer_kind(self._trained.optimizer),
            param_groups=[_plain(g) for g in _basic(self._trained.optimizer).param_groups],
            loss_scale=_loss_scale(self._trained.loss_scaler),
            sampler=self._sampler_state(),
            planner=module.planner_settings.model_dump(mode="json"),
            versions={n: importlib.metadata.version(n) for n in ("ds-infinipipe", "deepspeed")}
            | {"torch": torch.__version__},
        )

    def _model_config(self) -> dict[str, Any]:
        hf_config = self._trained.module.hf_config
        values: dict[str, Any] = json.loads(hf_config.to_json_string(use_diff=False))
        values.pop("_name_or_path", None)
        values["architectures"] = [hf_class(hf_config, "ForCausalLM").__name__]
        return values

    def _sampler_state(self) -> dict[str, Any] | None:
        """Position of the training data, less the batch that was read ahead and not trained."""
        data = self._trained.data
        if data.sampler is None:
            return None
        pending = min(data.num_ahead, data.sampler.next_step)
        state: dict[str, Any] = data.sampler.state_dict(pending=pending)
        return state

    # ---- loading

    def _check(
        self, place: Path, manifest: Manifest, with_optimizer: bool, with_schedule: bool
    ) -> dict[str, Any]:
        """Whatever makes loading impossible, before anything is changed; returns the extras."""
        check_files(
            place,
            manifest,
            verify=self._settings.verify,
            rank=self._rank.global_rank,
            world_size=self._rank.world_size,
        )
        extras = read_extras(place, manifest)
        kind = _optimizer_kind(self._trained.optimizer)
        if with_optimizer and manifest.optimizer != kind:
            raise CheckpointError(
                f"checkpoint {place} has states of {manifest.optimizer}, this run uses {kind}: "
                "pass load_optimizer_states=False to start the optimizer afresh"
            )
        if not with_schedule:
            return extras
        num_groups = len(_basic(self._trained.optimizer).param_groups)
        if len(manifest.param_groups) != num_groups:
            raise CheckpointError(
                f"checkpoint {place} has {len(manifest.param_groups)} parameter groups, this run "
                f"{num_groups}: pass load_lr_scheduler_states=False to keep this run's"
            )
        if (extras["lr_scheduler"] is None) != (self._trained.lr_scheduler is None):
            has, lacks = ("the checkpoint", "this run")
            if not extras["lr_scheduler"]:
                has, lacks = lacks, has
            raise CheckpointError(
                f"{has} has a learning-rate schedule and {lacks} ({place}) has none: pass "
                "load_lr_scheduler_states=False, or use the scheduler settings it was saved with"
            )
        return extras

    def _restore_data(self, manifest: Manifest) -> None:
        data = self._trained.data
        if data.sampler is None or manifest.sampler is None:
            if self._rank.is_first:
                logger.warning(
                    "the position in the data is not restored: %s (%d steps with %d sequences were "
                    "trained)",
                    "this run's data has none, so start your iterator or data set behind what was "
                    "trained, or it is trained again"
                    if data.sampler is None
                    else "the checkpoint has none, so this run starts at the first of its data",
                    manifest.global_steps,
                    manifest.global_samples,
                )
            return
        data.sampler.load_state_dict(manifest.sampler)
        data.forget()

    def _restore_progress(self, manifest: Manifest) -> None:
        self._set_counters(
            Counters(manifest.global_steps, manifest.global_samples, manifest.skipped_steps)
        )
        self._restore_loss_scale(manifest)

    def _restore_loss_scale(self, manifest: Manifest) -> None:
        """Go on with the saved scale; what the run's own settings say of it stays."""
        scaler, saved = self._trained.loss_scaler, manifest.loss_scale
        if scaler is None or not scaler.dynamic:
            return
        if saved is None or not saved.get("dynamic"):
            if self._rank.is_first:
                logger.warning(
                    "the checkpoint has no dynamic loss scale: it starts anew at %g",
                    scaler.cur_scale,
                )
            return
        for name in _SCALER_STATE:
            setattr(scaler, name, saved[name])

    def _restore_schedule(self, manifest: Manifest, extras: Mapping[str, Any]) -> None:
        groups = _basic(self._trained.optimizer).param_groups
        for group, saved in zip(groups, manifest.param_groups, strict=True):
            for name, value in saved.items():
                if name in _KERNEL_CHOICES:
                    continue
                group[name] = tuple(value) if isinstance(value, list) else value
        if self._trained.lr_scheduler is not None:
            self._trained.lr_scheduler.load_state_dict(extras["lr_scheduler"])

    def _warn_of_changes(self, manifest: Manifest) -> None:
        now = self._model_config()
        changed = sorted(
            key
            for key in now.keys() | manifest.model.keys()
            if key not in _NEUTRAL_CONFIG and now.get(key) != manifest.model.get(key)
        )
        if changed and self._rank.is_first:
            logger.warning(
                "the model's parameters fit, but its config differs in %s", ", ".join(changed)
            )


def _basic(optimizer: Any) -> Any:
    """The optimizer inside DeepSpeed's wrapper, if there is one."""
    return getattr(optimizer, "optimizer", optimizer)


def _optimizer_kind(optimizer: Any) -> str:
    """Name of the method; fused and offloaded Adams keep the same states."""
    name = type(_basic(optimizer)).__name__.lower()
    return "adam" if "adam" in name else name


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's hyperparameters."""
    plain = (bool, int, float, str, type(None))
    values = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items()}
    return {
        key: value
        for key, value in values.items()
        if key != "params"
        and (
            isinstance(value, plain)
            or (isinstance(value, (list, tuple)) and all(isinstance(v, plain) for v in value))
        )
    }


def _loss_scale(scaler: Any) -> dict[str, Any] | None:
    if scaler is None:
        return None
    return {k: v for k, v in vars(scaler).items() if isinstance(v, (bool, int, float))}
