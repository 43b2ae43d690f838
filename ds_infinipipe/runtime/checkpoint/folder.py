"""Where checkpoints lie, and how one appears at once or not at all.

A checkpoint grows in a hidden folder beside its place. Its manifest is written last, then the
folder is renamed, then `latest` is replaced. So what stands under a visible name is complete, and
a kill at any moment leaves the last good one as it was; what it leaves hidden, the next save
removes. Only rank 0 calls what changes anything here.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from ds_infinipipe.errors import CheckpointError
from ds_infinipipe.runtime.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from ds_infinipipe.runtime.checkpoint.tensor_file import write_durably

__all__ = [
    "discard",
    "find_checkpoint",
    "has_checkpoint",
    "prepare",
    "publish",
    "remove_old",
    "step_tag",
    "sync_folder",
    "unfinished",
]

logger = logging.getLogger(__name__)

LATEST_FILE = "latest"
_UNFINISHED, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removing-"
_STEP_TAG = re.compile(r"global_step\d+")


def step_tag(global_steps: int) -> str:
    """DeepSpeed's name for a checkpoint that was given none."""
    return f"global_step{global_steps}"


def unfinished(save_dir: Path, tag: str) -> Path:
    """The hidden folder in which a checkpoint grows."""
    return save_dir / f"{_UNFINISHED}{tag}"


def find_checkpoint(save_dir: Path, tag: str | None = None) -> Path:
    """The folder of a checkpoint, by default of the one `latest` names; CheckpointError if none.

    `save_dir` may be a checkpoint itself, if no tag is given.
    """
    if tag is None:
        if (save_dir / MANIFEST_FILE).is_file():
            return save_dir
        tag = _read_latest(save_dir)
    for folder in (save_dir / tag, save_dir / f"{_REPLACED}{tag}"):
        if (folder / MANIFEST_FILE).is_file():
            return folder
    read_manifest(save_dir / tag)  # says what is there instead
    raise CheckpointError(f"there is no checkpoint {tag!r} in {save_dir}")


def has_checkpoint(save_dir: Path) -> bool:
    """True where `find_checkpoint` has something to follow, even if that is damaged."""
    return (save_dir / LATEST_FILE).is_file()


def _read_latest(save_dir: Path) -> str:
    path = save_dir / LATEST_FILE
    if not path.is_file():
        read_manifest(save_dir)  # says what is there instead
    try:
        tag = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not tag or "/" in tag:
        raise CheckpointError(f"{path} is damaged: it names {tag!r}; give a tag")
    return tag


def prepare(save_dir: Path, tag: str) -> Path:
    """Make the hidden folder of a new checkpoint, after removing what killed saves left."""
    save_dir.mkdir(parents=True, exist_ok=True)
    for leftover in sorted(save_dir.glob(f"{_REPLACED}*")):
        place = save_dir / leftover.name.removeprefix(_REPLACED)
        if place.exists():
            shutil.rmtree(leftover)
        else:
            leftover.rename(place)  # killed between the two renames of `publish`
    for pattern in (_UNFINISHED, _REMOVED):
        for leftover in sorted(save_dir.glob(f"{pattern}*")):
            logger.warning("removing %s, which a killed run left", leftover)
            shutil.rmtree(leftover)
    folder = unfinished(save_dir, tag)
    folder.mkdir()
    return folder


def publish(save_dir: Path, tag: str, manifest: Manifest, *, is_latest: bool) -> None:
    """Complete a checkpoint whose files are all on disk, and make it visible at once."""
    folder, place = unfinished(save_dir, tag), save_dir / tag
    manifest.check_complete(f"the checkpoint {tag} that is being saved")
    write_durably(folder / MANIFEST_FILE, manifest.to_json().encode())
    kept = {MANIFEST_FILE, *(f.path for f in manifest.all_files)}
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    sync_folder(folder)
    replaced = save_dir / f"{_REPLACED}{tag}"
    if place.exists():
        place.rename(replaced)
    folder.rename(place)
    sync_folder(save_dir)
    if is_latest:
        _write_latest(save_dir, tag)
    if replaced.exists():
        shutil.rmtree(replaced)


def _write_latest(save_dir: Path, tag: str) -> None:
    hidden = save_dir / f".{LATEST_FILE}"
    write_durably(hidden, tag.encode())
    hidden.replace(save_dir / LATEST_FILE)
    sync_folder(save_dir)


def discard(save_dir: Path, tag: str) -> None:
    """Remove a checkpoint that could not be completed."""
    shutil.rmtree(unfinished(save_dir, tag), ignore_errors=True)


def remove_old(save_dir: Path, keep_last: int) -> None:
    """Keep the `keep_last` youngest checkpoints named by step; those with other tags stay."""
    found = []
    for folder in save_dir.iterdir():
        if _STEP_TAG.fullmatch(folder.name) and (folder / MANIFEST_FILE).is_file():
            try:
                found.append((read_manifest(folder).saved_at, folder))
            except CheckpointError as error:
                logger.warning("%s; it is left as it is", error)
    latest = _read_latest(save_dir) if has_checkpoint(save_dir) else None
    for _, folder in sorted(found)[:-keep_last]:
        if folder.name != latest:
            hidden = folder.rename(save_dir / f"{_REMOVED}{folder.name}")
            shutil.rmtree(hidden)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
