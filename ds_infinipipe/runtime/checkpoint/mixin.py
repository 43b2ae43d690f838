"""DeepSpeed's `save_checkpoint` and `load_checkpoint` over our format, as a part of the engine."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from ds_infinipipe.errors import CheckpointError, ConfigError
from ds_infinipipe.model.hf import hf_class
from ds_infinipipe.runtime.agree import raise_together
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

__all__ = ["CheckpointMixin"]

logger = logging.getLogger(__name__)

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# how an optimizer computes, not what
_KERNEL_CHOICES = frozenset({"capturable", "differentiable", "foreach", "fused"})
_NEUTRAL_CONFIG = frozenset({"architectures", "dtype", "transformers_version"})


class CheckpointMixin:
    """Saving and loading for the engine; `self` is an InfiniPipeEngine."""

    # what is used of the engine
    global_rank: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    loss_scaler: Any
    lr_scheduler: Any
    module: Any
    optimizer: Any
    settings: Any
    sharding: Any
    stage_id: int
    training_dataloader: Any
    _feeds: Any

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save under `save_dir/tag` (default "global_step<N>"), a collective; returns True.

        Any layout can load it. `client_state` is rank 0's: numbers, strings, tensors, lists and
        dictionaries. With `infinipipe.checkpoint.asynchronous` a copy is taken and written beside
        training, and what fails is raised by the next call here or by `close`. Raises
        CheckpointError on every rank where it cannot be written; older checkpoints stay untouched.
        """
        if exclude_frozen_parameters:
            raise ConfigError("exclude_frozen_parameters is not supported: loading needs them all")
        if not save_dir:
            raise ConfigError(f"save_dir is {save_dir!r}; give a folder that all nodes share")
        name = folder.step_tag(self.global_steps) if tag is None else str(tag)
        with raise_together("saving a checkpoint"):
            contents = self._contents(dict(client_state or {}))
        self._saver.save(Path(save_dir), name, contents, is_latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load `load_dir/tag` (default: what `latest` names), saved at any layout; a collective.

        Restores weights, optimizer and its hyperparameters, schedule, loss scale, counters and the
        position in the data. `load_module_only` takes the weights alone, and like
        `load_optimizer_states=False` lets the optimizer start afresh. Returns the folder and the
        saved `client_state`. Raises CheckpointError where there is nothing to load (DeepSpeed
        returns None), and for a damaged, foreign or other model's checkpoint, before anything has
        changed; the sampler's ConfigError where it would draw other batches.
        """
        if custom_load_fn is not None or not load_module_strict:
            raise ConfigError("checkpoints are loaded whole: drop custom_load_fn and strict=False")
        self._saver.wait()
        where = f"loading a checkpoint from {load_dir}"
        with raise_together(where):
            place = folder.find_checkpoint(Path(load_dir), None if tag is None else str(tag))
            manifest = read_manifest(place)
        state = self._training_state()
        shapes = gather_shapes(self._full_shapes())
        with_optimizer = load_optimizer_states and not load_module_only
        with_schedule = load_lr_scheduler_states and not load_module_only
        with raise_together(where):
            compare_parameters(manifest.shapes, shapes, f"checkpoint {place}")
            extras = self._check(place, manifest, with_optimizer, with_schedule)
            if not load_module_only:
                self._restore_data(manifest)
        state.begin_load()
        with raise_together(where):
            fill_state(state, place, manifest, with_optimizer=with_optimizer)
        state.finish_load()
        if not load_module_only:
            self._restore_progress(manifest)
        if with_schedule:
            self._restore_schedule(manifest, extras)
        self._warn_of_changes(manifest)
        return str(place), extras["client_state"]

    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save is complete, a collective; raises what failed."""
        self._saver.wait()

    @functools.cached_property
    def _saver(self) -> CheckpointSaver:
        settings = self.settings.checkpoint
        return CheckpointSaver(asynchronous=settings.asynchronous, keep_last=settings.keep_last)

    # ---- saving

    def _training_state(self) -> TrainingState:
        module = self.module
        cut = getattr(self.sharding, "cut", None)
        return make_state(module.hf_parameters(), self.optimizer, module.zero_stage, cut)

    def _full_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: full_shape(p) for name, p in self.module.hf_parameters()}

    def _contents(self, client_state: dict[str, Any]) -> Contents:
        state = self._training_state()
        module = self.module
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        # the last stage's copy of a tied weight equals the first stage's, which is saved
        copy = module.tied_parameter if self.stage_id > 0 else None
        skipped = {name for name, p in module.hf_parameters() if p is copy}
        return Contents(
            part=(self.stage_id, state.shard),
            shares=[s for s in state.shares() if s.name not in skipped],
            shapes={n: s for n, s in self._full_shapes().items() if n not in skipped},
            manifest=self._draft_manifest(),
            extras=pack_extras(client_state=client_state, lr_scheduler=schedule),
        )

    def _draft_manifest(self) -> Manifest:
        module = self.module
        return Manifest(
            global_steps=self.global_steps,
            global_samples=self.global_samples,
            skipped_steps=self.skipped_steps,
            saved_at=time.time(),
            dtype=str(module.dtype).removeprefix("torch."),
            layout={**asdict(module.layout), "zero_stage": module.zero_stage},
            model=self._model_config(),
            optimizer=_optimizer_kind(self.optimizer),
            param_groups=[_plain(g) for g in _basic(self.optimizer).param_groups],
            loss_scale=_loss_scale(self.loss_scaler),
            sampler=self._sampler_state(),
            planner=self.module.planner_settings.model_dump(mode="json"),
            versions={n: importlib.metadata.version(n) for n in ("ds-infinipipe", "deepspeed")}
            | {"torch": torch.__version__},
        )

    def _model_config(self) -> dict[str, Any]:
        hf_config = self.module.hf_config
        values: dict[str, Any] = json.loads(hf_config.to_json_string(use_diff=False))
        values.pop("_name_or_path", None)
        values["architectures"] = [hf_class(hf_config, "ForCausalLM").__name__]
        return values

    def _sampler_state(self) -> dict[str, Any] | None:
        """Position of the training data, less the batch that was read ahead and not trained."""
        sampler = getattr(self.training_dataloader, "sampler", None)
        if sampler is None:
            return None
        pending = min(self._feeds.num_ahead, sampler.next_step)
        state: dict[str, Any] = sampler.state_dict(pending=pending)
        return state

    # ---- loading

    def _check(
        self, place: Path, manifest: Manifest, with_optimizer: bool, with_schedule: bool
    ) -> dict[str, Any]:
        """Whatever makes loading impossible, before anything is changed; returns the extras."""
        check_files(
            place,
            manifest,
            verify=self.settings.checkpoint.verify,
            rank=torch_dist.get_rank(),
            world_size=torch_dist.get_world_size(),
        )
        extras = read_extras(place, manifest)
        kind = _optimizer_kind(self.optimizer)
        if with_optimizer and manifest.optimizer != kind:
            raise CheckpointError(
                f"checkpoint {place} has states of {manifest.optimizer}, this run uses {kind}: "
                "pass load_optimizer_states=False to start the optimizer afresh"
            )
        if not with_schedule:
            return extras
        num_groups = len(_basic(self.optimizer).param_groups)
        if len(manifest.param_groups) != num_groups:
            raise CheckpointError(
                f"checkpoint {place} has {len(manifest.param_groups)} parameter groups, this run "
                f"{num_groups}: pass load_lr_scheduler_states=False to keep this run's"
            )
        if (extras["lr_scheduler"] is None) != (self.lr_scheduler is None):
            has, lacks = (
                ("the checkpoint", "this run")
                if extras["lr_scheduler"]
                else (
                    "this run",
                    "the checkpoint",
                )
            )
            raise CheckpointError(
                f"{has} has a learning-rate schedule and {lacks} ({place}) has none: pass "
                "load_lr_scheduler_states=False, or use the scheduler settings it was saved with"
            )
        return extras

    def _restore_data(self, manifest: Manifest) -> None:
        sampler = getattr(self.training_dataloader, "sampler", None)
        if not self.settings.checkpoint.restore_data:
            return
        if sampler is None or manifest.sampler is None:
            if self.global_rank == 0:
                logger.warning(
                    "the position in the data is not restored: %s (%d steps with %d sequences were "
                    "trained)",
                    "this run's data has none, so start your iterator or data set behind what was "
                    "trained, or it is trained again"
                    if sampler is None
                    else "the checkpoint has none, so this run starts at the first of its data",
                    manifest.global_steps,
                    manifest.global_samples,
                )
            return
        sampler.load_state_dict(manifest.sampler)
        self._feeds.forget()

    def _restore_progress(self, manifest: Manifest) -> None:
        self.global_steps = manifest.global_steps
        self.global_samples = manifest.global_samples
        self.skipped_steps = manifest.skipped_steps
        self._restore_loss_scale(manifest)

    def _restore_loss_scale(self, manifest: Manifest) -> None:
        """Go on with the saved scale; what the run's own settings say of it stays."""
        scaler, saved = self.loss_scaler, manifest.loss_scale
        if scaler is None or not scaler.dynamic:
            return
        if saved is None or not saved.get("dynamic"):
            if self.global_rank == 0:
                logger.warning(
                    "the checkpoint has no dynamic loss scale: it starts anew at %g",
                    scaler.cur_scale,
                )
            return
        for name in _SCALER_STATE:
            setattr(scaler, name, saved[name])

    def _restore_schedule(self, manifest: Manifest, extras: Mapping[str, Any]) -> None:
        groups = _basic(self.optimizer).param_groups
        for group, saved in zip(groups, manifest.param_groups, strict=True):
            for name, value in saved.items():
                if name in _KERNEL_CHOICES:
                    continue
                group[name] = tuple(value) if isinstance(value, list) else value
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(extras["lr_scheduler"])

    def _warn_of_changes(self, manifest: Manifest) -> None:
        now = self._model_config()
        changed = sorted(
            key
            for key in now.keys() | manifest.model.keys()
            if key not in _NEUTRAL_CONFIG and now.get(key) != manifest.model.get(key)
        )
        if changed and self.global_rank == 0:
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
