"""When `infinipipe train` saves, and where it goes on; all calls are collectives."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as torch_dist

from ds_infinipipe.config.section import CheckpointSettings
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.runtime.checkpoint.checkpointer import Checkpointer
from ds_infinipipe.runtime.checkpoint.folder import has_checkpoint
from ds_infinipipe.runtime.ranks.agree import check_writable

__all__ = ["CheckpointRoutine"]

logger = logging.getLogger(__name__)


class CheckpointRoutine:
    """Does what the `checkpoint` section asks for around a training loop."""

    def __init__(self, checkpointer: Checkpointer, settings: CheckpointSettings) -> None:
        self._checkpointer = checkpointer
        self._settings = settings
        self._saved_step: int | None = None

    def resume(self, steps: int) -> None:
        """Load the checkpoint to go on from, if there is one and it is wanted.

        Raises CheckpointError where it cannot be used, and ConfigError where it is beyond `steps`.
        """
        source = self._source()
        if source is None:
            return
        place, _ = self._checkpointer.load(source)
        self._saved_step = step = self._checkpointer.global_steps
        if step > steps:
            raise ConfigError(
                f"{place} was taken after step {step}, training is to end "
                f"after step {steps}: raise infinipipe.training.steps, or set "
                "infinipipe.checkpoint.resume to null"
            )
        logger.info("resumed from %s after step %d", place, step)
        if step == steps:
            logger.info(
                "nothing left to do: infinipipe.training.steps is %d; raise it to go on", steps
            )

    def check_writable(self) -> None:
        """Raise CheckpointError on every rank if rank 0 cannot write where it is to save."""
        folder = self._settings.save_dir
        if folder is not None:
            check_writable(folder, "infinipipe.checkpoint.save_dir")

    def after_step(self) -> None:
        """Save if it is time to."""
        every = self._settings.every_steps
        if every is not None and self._checkpointer.global_steps % every == 0:
            self._save()

    def at_end(self) -> None:
        """Save the last step if that was not done, and wait until all is on disk."""
        if self._settings.save_dir is not None:
            self._save()
        self._checkpointer.wait()

    def _save(self) -> None:
        step, folder = self._checkpointer.global_steps, self._settings.save_dir
        assert folder is not None
        if self._saved_step != step:
            self._checkpointer.save(folder)
            self._saved_step = step

    def _source(self) -> str | None:
        """What to load; rank 0 looks, so that all ranks decide alike."""
        settings = self._settings
        if settings.resume != "auto":
            return settings.resume
        if settings.save_dir is None:
            return None
        found = [has_checkpoint(Path(settings.save_dir))]
        torch_dist.broadcast_object_list(found, src=0)
        return settings.save_dir if found[0] else None
