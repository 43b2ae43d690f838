"""What a checkpoint holds: every parameter's pieces by file, and all that is not a tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_infinipipe.errors import CheckpointError

__all__ = [
    "MANIFEST_FILE",
    "WEIGHT",
    "DataFile",
    "Manifest",
    "Piece",
    "compare_parameters",
    "listed",
    "read_manifest",
    "tensor_key",
]

MANIFEST_FILE = "manifest.json"
WEIGHT = "weight"
"""Kind of the master weights; other kinds are named by the optimizer (exp_avg, ...)."""

_FORMAT = "ds_infinipipe training state"
_VERSION = 1
_MAX_LISTED = 10


def tensor_key(kind: str, name: str) -> str:
    """Name of a flat piece in its file."""
    return f"{kind}/{name}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, end) of a parameter, counted over its flattened shape.

    `kinds` are the tensors saved of it, `counters` the optimizer's numbers for it, such as `step`.
    """

    name: str
    start: int
    end: int
    kinds: tuple[str, ...]
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of tensors, or with no pieces one of anything else."""

    path: str
    num_bytes: int
    sha256: str
    pieces: tuple[Piece, ...] = ()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> DataFile:
        """Inverse of `asdict`, after JSON."""
        pieces = tuple(Piece(**{**p, "kinds": tuple(p["kinds"])}) for p in content["pieces"])
        return cls(**{**content, "pieces": pieces})


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents. Sizes in bytes, `saved_at` in seconds since 1970."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    saved_at: float
    dtype: str
    """Training dtype, such as "bfloat16"; masters may have another."""
    layout: Mapping[str, Any]
    model: Mapping[str, Any]
    """The Hugging Face config."""
    optimizer: str
    param_groups: Sequence[Mapping[str, Any]]
    """The optimizer's hyperparameters as they stood, by group."""
    loss_scale: Mapping[str, Any] | None
    sampler: Mapping[str, Any] | None
    planner: Mapping[str, Any]
    versions: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    files: tuple[DataFile, ...] = ()
    extras: DataFile | None = None

    def to_json(self) -> str:
        """JSON that carries its own checksum."""
        body = json.loads(json.dumps(asdict(self)))
        return json.dumps({"format": _FORMAT, "version": _VERSION, "digest": _digest(body), **body})

    @property
    def all_files(self) -> tuple[DataFile, ...]:
        return self.files if self.extras is None else (*self.files, self.extras)

    def pieces_of(self, name: str) -> Iterator[tuple[DataFile, Piece]]:
        """Where a parameter lies."""
        yield from self._by_name.get(name, ())

    @cached_property
    def _by_name(self) -> Mapping[str, list[tuple[DataFile, Piece]]]:
        found: dict[str, list[tuple[DataFile, Piece]]] = {}
        for file in self.files:
            for piece in file.pieces:
                found.setdefault(piece.name, []).append((file, piece))
        return found

    def check_complete(self, where: str) -> None:
        """Raise CheckpointError unless the pieces make up every parameter, each element once."""
        problems = []
        for name, shape in self.shapes.items():
            count = 1
            for size in shape:
                count *= size
            pieces = sorted((p.start, p.end) for _, p in self.pieces_of(name))
            kinds = {p.kinds for _, p in self.pieces_of(name)}
            ends = [0, *(end for _, end in pieces)]
            if ends[-1] != count or [start for start, _ in pieces] != ends[:-1]:
                problems.append(f"{name} has the pieces {pieces} of {count} elements")
            elif len(kinds) != 1:
                problems.append(f"{name} has pieces with different states {sorted(kinds)}")
        if problems:
            raise CheckpointError(f"{where} is incomplete: {listed(problems)}")


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; CheckpointError says what is there instead."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is no checkpoint of ds_infinipipe: {_describe(folder)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or cannot be read: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise CheckpointError(f"{path} was not written by ds_infinipipe")
    version = content.pop("version", None)
    if version != _VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this installation reads {_VERSION}: use the "
            "release of ds_infinipipe that wrote it"
        )
    if content.pop("digest", None) != _digest(content):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return _from_body(content)


def _from_body(body: dict[str, Any]) -> Manifest:
    body["files"] = tuple(DataFile.from_dict(f) for f in body["files"])
    body["extras"] = None if body["extras"] is None else DataFile.from_dict(body["extras"])
    body["shapes"] = {name: tuple(shape) for name, shape in body["shapes"].items()}
    return Manifest(**body)


def _describe(folder: Path) -> str:
    if not folder.exists():
        return "it does not exist"
    if not folder.is_dir():
        return "it is not a folder"
    names = sorted(p.name for p in folder.iterdir())
    if any(n.endswith(("_model_states.pt", "_optim_states.pt")) for n in names):
        return (
            "it holds files of DeepSpeed's own engine, which are not re-shardable; convert them "
            "to a Hugging Face folder and set infinipipe.model.path"
        )
    if "config.json" in names:
        return (
            "it looks like a Hugging Face folder, which has no optimizer states; set "
            "infinipipe.model.path to start from its weights"
        )
    return f"it holds {listed(names)}" if names else "it is empty"


def compare_parameters(
    saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise CheckpointError listing the parameters that are missing, unknown or shaped otherwise.

    `wanted` is the whole model's.
    """
    problems = [f"{n} is not in the checkpoint" for n in wanted if n not in saved]
    problems += [f"{n} is not in the model" for n in saved if n not in wanted]
    problems += [
        f"{n} has shape {saved[n]}, the model {wanted[n]}"
        for n in wanted
        if n in saved and saved[n] != wanted[n]
    ]
    if problems:
        raise CheckpointError(
            f"{where} is of another model, {len(problems)} parameters differ: {listed(problems)}; "
            "use the model settings it was saved with"
        )


def listed(items: Sequence[str]) -> str:
    """The first few items, and how many more there are."""
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more
