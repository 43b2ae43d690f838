"""Write a checkpoint: each rank its own file, rank 0 the rest, in place or by a thread beside.

No tensor is sent anywhere. A rank that has written leaves a record in the hidden folder; rank 0
makes the manifest of the records and publishes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from ds_infinipipe.errors import CheckpointError, ConfigError
from ds_infinipipe.runtime.checkpoint import folder, tensor_file
from ds_infinipipe.runtime.checkpoint.manifest import DataFile, Manifest, Piece, tensor_key
from ds_infinipipe.runtime.checkpoint.state import Share
from ds_infinipipe.runtime.checkpoint.tensor_file import TensorHeader
from ds_infinipipe.runtime.ranks.agree import raise_together

__all__ = ["EXTRAS_FILE", "CheckpointSaver", "Contents", "pack_extras"]

logger = logging.getLogger(__name__)

EXTRAS_FILE = "extras.pt"
_STALL_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Contents:
    """What one rank contributes. `manifest` and `extras` are used on rank 0 only.

    Ranks with the same `part` (stage, shard) hold equal shares; the first of them writes.
    """

    part: tuple[int, int]
    shares: Sequence[Share]
    shapes: Mapping[str, tuple[int, ...]]
    manifest: Manifest
    extras: bytes


def pack_extras(**extras: Any) -> bytes:
    """Bytes of what is neither tensor of the model nor JSON: user's state and schedule.

    Raises CheckpointError for objects that could not be read back without running their code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(extras, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # whatever pickling this object raises
        raise CheckpointError(
            f"client_state or the scheduler's state cannot be stored: {error}; keep to numbers, "
            "strings, tensors, lists and dictionaries"
        ) from error
    return buffer.getvalue()


class CheckpointSaver:
    """Saves on all ranks together; at most one checkpoint is being written at any time."""

    def __init__(self, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        self._asynchronous = asynchronous
        self._keep_last = keep_last
        self._job: _Job | None = None
        self._rank = torch_dist.get_rank()

    def save(self, save_dir: Path, tag: str, contents: Contents, *, is_latest: bool = True) -> None:
        """Save, a collective; with `asynchronous` only take a copy, which a thread writes.

        Raises CheckpointError on every rank where one cannot write; what was saved before is
        untouched then.
        """
        self.wait()
        with raise_together("saving a checkpoint"):
            _check_tag(tag)
        names = _agree(tag, contents.part)
        job = _Job(
            save_dir,
            tag,
            contents,
            own_name=names.get(self._rank),
            names=tuple(sorted(names.values())),
            is_latest=is_latest,
            keep_last=self._keep_last,
            is_publisher=self._rank == 0,
        )
        with raise_together(f"preparing checkpoint {tag}"), job.explain():
            if job.is_publisher:
                folder.prepare(save_dir, tag)
        if self._asynchronous:
            self._job = job.copied()
            self._job.start()
            return
        try:
            with raise_together(f"writing checkpoint {tag}"):
                job.write()
            with raise_together(f"publishing checkpoint {tag}"):
                job.publish()
        except Exception:
            job.discard()
            raise

    def wait(self) -> None:
        """Wait for the checkpoint being written, a collective; raises what went wrong with it."""
        job, self._job = self._job, None
        if job is None:
            return
        try:
            with raise_together(f"writing checkpoint {job.tag}"):
                job.finish_writing()
            with raise_together(f"publishing checkpoint {job.tag}"):
                job.finish()
        except Exception:
            job.cancel()
            job.discard()
            raise

    def close(self) -> None:
        """Wait without a collective, as peers may be gone; raises this rank's error."""
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job.finish()
        except Exception:
            job.discard()
            raise


def _bytes_in(place: Path) -> int:
    total = 0
    for path in place.iterdir():
        # a rank gives its files their last names meanwhile
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@dataclass
class _Job:
    """One checkpoint on its way to the disk; the methods up to `start` run in either thread."""

    save_dir: Path
    tag: str
    contents: Contents
    own_name: str | None
    """This rank's file without suffix; None where a replica writes the same."""
    names: tuple[str, ...]
    is_latest: bool
    keep_last: int | None
    is_publisher: bool
    _written: threading.Event = field(default_factory=threading.Event)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _write_error: Exception | None = None
    _error: Exception | None = None
    _thread: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        return folder.unfinished(self.save_dir, self.tag)

    @contextlib.contextmanager
    def explain(self) -> Iterator[None]:
        """Say of a file system's error what it means for the checkpoint."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            repair = (
                "free some, or keep fewer checkpoints (infinipipe.checkpoint.keep_last)"
                if full
                else "the folder must be writable and shared by all nodes"
            )
            raise CheckpointError(
                f"checkpoint {self.tag} cannot be written to {self.save_dir}: "
                f"{'no space is left' if full else error}; {repair}. What was saved before is "
                "untouched"
            ) from error

    def write(self) -> None:
        """This rank's file, and the record that says so."""
        with self.explain():
            if self.is_publisher:
                tensor_file.write_durably(self.folder / EXTRAS_FILE, self.contents.extras)
            if self.own_name is not None:
                self._write_shares(self.own_name)

    def _write_shares(self, name: str) -> None:
        shares = self.contents.shares
        items = [
            (TensorHeader(tensor_key(k, s.name), t.dtype, tuple(t.shape)), t)
            for s in shares
            for k, t in s.tensors.items()
        ]
        items.sort(key=lambda item: -item[0].dtype.itemsize)  # keeps every tensor aligned
        path = self.folder / f"{name}.safetensors"
        size, digest = tensor_file.write_tensors(path, [h for h, _ in items], (t for _, t in items))
        pieces = tuple(Piece(s.name, s.start, s.end, tuple(s.tensors), s.counters) for s in shares)
        file = asdict(DataFile(path.name, size, digest, pieces))
        record = json.dumps({"file": file, "shapes": self.contents.shapes})
        hidden = self.folder / f".{name}.json"
        tensor_file.write_durably(hidden, record.encode())
        hidden.replace(self.folder / f"{name}.json")

    def publish(self) -> None:
        """Rank 0: wait for all records, complete the manifest, make the checkpoint visible."""
        if not self.is_publisher:
            return
        with self.explain():
            records = self._await_records()
            extras = tensor_file.hash_file(self.folder / EXTRAS_FILE)
            manifest = replace(
                self.contents.manifest,
                shapes={n: tuple(s) for r in records for n, s in r["shapes"].items()},
                files=tuple(DataFile.from_dict(r["file"]) for r in records),
                extras=DataFile(EXTRAS_FILE, len(self.contents.extras), extras),
            )
            folder.publish(self.save_dir, self.tag, manifest, is_latest=self.is_latest)
            logger.info("saved checkpoint %s", self.save_dir / self.tag)
            if self.keep_last is not None:
                folder.remove_old(self.save_dir, self.keep_last)

    def _await_records(self) -> list[dict[str, Any]]:
        """All ranks' records; CheckpointError when one failed or nothing grows any more."""
        seen, since = -1, time.monotonic()
        while True:
            missing = [n for n in self.names if not (self.folder / f"{n}.json").is_file()]
            if not missing:
                return [
                    json.loads((self.folder / f"{n}.json").read_text("utf-8")) for n in self.names
                ]
            reasons = [self.folder / f"{name}.failed" for name in missing]
            failed = [r.read_text("utf-8") for r in reasons if r.is_file()]
            size = _bytes_in(self.folder)
            if size != seen:
                seen, since = size, time.monotonic()
            if failed:
                raise CheckpointError(failed[0])
            if self._cancelled.is_set() or time.monotonic() - since > _STALL_S:
                raise CheckpointError(
                    f"checkpoint {self.tag} lacks the files of {', '.join(missing)}: their ranks "
                    "failed or ended; what was saved before is untouched"
                )
            time.sleep(_POLL_S)

    def discard(self) -> None:
        """Rank 0: remove what there is."""
        if self.is_publisher:
            folder.discard(self.save_dir, self.tag)

    # ---- beside training

    def copied(self) -> _Job:
        """The same with tensors of its own, on the CPU."""
        if self.own_name is None:
            return self
        shares = [
            replace(s, tensors={k: t.to("cpu", copy=True) for k, t in s.tensors.items()})
            for s in self.contents.shares
        ]
        return replace(self, contents=replace(self.contents, shares=shares))

    def start(self) -> None:
        """Write and publish in a thread. It is not a daemon: the interpreter's end waits for it."""
        self._thread = threading.Thread(target=self._run, name=f"save {self.tag}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.write()
        except Exception as error:  # raised by the next call that asks
            logger.error("%s", error)
            self._write_error = self._error = error
            self._tell(error)
        self._written.set()
        try:
            if self._error is None:
                self.publish()
        except Exception as error:  # likewise
            logger.error("%s", error)
            self._error = error

    def _tell(self, error: Exception) -> None:
        """Leave word for rank 0, which waits for this rank's file."""
        hidden = self.folder / f".{self.own_name}.failed"
        try:
            hidden.write_text(str(error), encoding="utf-8")
            hidden.replace(self.folder / f"{self.own_name}.failed")
        except OSError as no_word:  # the disk may be full; then the next collective tells it
            logger.warning("rank 0 cannot be told of it: %s", no_word)

    def finish_writing(self) -> None:
        """Wait for this rank's own file."""
        self._written.wait()
        if self._write_error is not None:
            raise self._write_error

    def finish(self) -> None:
        """Wait for all this rank has to do."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Give up waiting for other ranks' files."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()


def _check_tag(tag: str) -> None:
    if not tag or "/" in tag or tag.startswith(".") or tag == folder.LATEST_FILE:
        raise ConfigError(f"tag {tag!r} cannot name a folder of checkpoints: use letters or digits")


def _agree(tag: str, part: tuple[int, int]) -> dict[int, str]:
    """Name of the file by writing rank, a collective; ConfigError where ranks pass other tags."""
    everyone: list[Any] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, (tag, part))
    tags = sorted({t for t, _ in everyone})
    if len(tags) > 1:
        raise ConfigError(f"ranks save under different tags {tags}: pass the same on all")
    first: dict[tuple[int, int], int] = {}
    for rank, (_, part_there) in enumerate(everyone):
        first.setdefault(part_there, rank)
    return {rank: f"stage-{s:02d}-shard-{i:03d}" for (s, i), rank in first.items()}
