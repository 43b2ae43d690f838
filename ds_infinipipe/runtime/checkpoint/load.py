"""Read a checkpoint at any layout: everything is checked before anything is changed.

Each rank reads the pieces that overlap what it keeps. Checksums are shared out over the ranks, so
that every file is read once for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_infinipipe.errors import CheckpointError
from ds_infinipipe.runtime.checkpoint.manifest import (
    WEIGHT,
    DataFile,
    Manifest,
    listed,
    tensor_key,
)
from ds_infinipipe.runtime.checkpoint.state import TrainingState
from ds_infinipipe.runtime.checkpoint.tensor_file import hash_file

__all__ = ["PieceReader", "check_files", "fill_state", "gather_shapes", "read_extras"]


def check_files(
    folder: Path, manifest: Manifest, *, verify: bool = True, rank: int = 0, world_size: int = 1
) -> None:
    """Raise CheckpointError for files that are missing, truncated or (with `verify`) changed.

    Sizes are compared of all files, checksums of this rank's share.
    """
    problems = []
    for index, file in enumerate(manifest.all_files):
        path = folder / file.path
        if not path.is_file():
            problems.append(f"{file.path} is missing")
        elif path.stat().st_size != file.num_bytes:
            problems.append(f"{file.path} has {path.stat().st_size} of {file.num_bytes} bytes")
        elif verify and index % world_size == rank and _hash(path) != file.sha256:
            problems.append(f"{file.path} is damaged, its checksum does not match")
    if problems:
        raise CheckpointError(
            f"checkpoint {folder} cannot be used: {listed(problems)}; load an older one by its tag"
        )
    manifest.check_complete(f"checkpoint {folder}")


def _hash(path: Path) -> str:
    try:
        return hash_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def gather_shapes(mine: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Full shapes of the whole model from each stage's, a collective."""
    everyone: list[Mapping[str, tuple[int, ...]]] = [{}] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, dict(mine))
    return {name: shape for shapes in everyone for name, shape in shapes.items()}


def read_extras(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The user's state and the scheduler's; nothing in the file is executed."""
    assert manifest.extras is not None
    path = folder / manifest.extras.path
    try:
        extras: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # unpickling damaged bytes raises anything
        raise CheckpointError(f"{path} is damaged or cannot be read: {error!r}") from error
    return extras


class PieceReader(contextlib.ExitStack):
    """Reads any range of any parameter; files stay open until the reader is closed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__()
        self._folder = folder
        self._manifest = manifest
        self._open: dict[str, Any] = {}

    def read(self, kind: str, name: str, start: int, into: Tensor) -> None:
        """Copy elements from `start` on into the 1-D tensor `into`, casting to its dtype."""
        end = start + into.numel()
        for file, piece in self._manifest.pieces_of(name):
            low, high = max(start, piece.start), min(end, piece.end)
            if low < high:
                saved = self._slice(file, tensor_key(kind, name), piece.end - piece.start)
                part = saved[low - piece.start : high - piece.start]
                into[low - start : high - start].copy_(part)

    def _slice(self, file: DataFile, key: str, count: int) -> Any:
        path = self._folder / file.path
        try:
            if file.path not in self._open:
                handle = safe_open(path, framework="pt", device="cpu")
                self._open[file.path] = self.enter_context(handle)
            saved = self._open[file.path].get_slice(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged or cannot be read: {error}") from error
        if list(saved.get_shape()) != [count]:
            raise CheckpointError(
                f"{path} is damaged: {key} has shape {saved.get_shape()}, not [{count}]"
            )
        return saved


def fill_state(
    state: TrainingState, folder: Path, manifest: Manifest, *, with_optimizer: bool
) -> None:
    """Masters and, if wanted, optimizer states of this rank; else the optimizer starts afresh."""
    kinds: dict[str, Sequence[str]] = {}
    counters: dict[str, Mapping[str, float]] = {}
    for name in manifest.shapes:
        _, piece = next(iter(manifest.pieces_of(name)))
        kinds[name] = tuple(k for k in piece.kinds if k != WEIGHT) if with_optimizer else ()
        counters[name] = piece.counters if with_optimizer else {}
    state.allocate(kinds, counters)
    with PieceReader(folder, manifest) as reader, torch.no_grad():
        for share in state.shares():
            for kind, tensor in share.tensors.items():
                reader.read(kind, share.name, share.start, tensor)
