"""A Hugging Face folder from a checkpoint: offline, one tensor in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ds_infinipipe.errors import CheckpointError, ConfigError
from ds_infinipipe.model.hf import load_hf_config
from ds_infinipipe.runtime.checkpoint.folder import find_checkpoint, sync_folder
from ds_infinipipe.runtime.checkpoint.load import PieceReader, check_files
from ds_infinipipe.runtime.checkpoint.manifest import (
    WEIGHT,
    Manifest,
    listed,
    read_manifest,
)
from ds_infinipipe.runtime.checkpoint.tensor_file import TensorHeader, write_durably, write_tensors

__all__ = ["ExportReport", "export_hf"]

_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: the checkpoint's step and the folder's contents."""

    folder: Path
    global_steps: int
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]


def export_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    tag: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    verify: bool = True,
) -> ExportReport:
    """Write the weights for transformers' `from_pretrained`, cast to `dtype` from the masters.

    `checkpoint` is a checkpoint or a folder of some, of which `tag` or the latest is taken. `dtype`
    is torch's name; the default is the one trained with. `out` appears when it is complete, and
    must not exist before. Raises ConfigError and CheckpointError, also where transformers' model
    has other parameters, as with layers of one's own whose `hf_name` does not give its names.
    """
    out = Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists already: give a new folder")
    folder = find_checkpoint(Path(checkpoint), tag)
    manifest = read_manifest(folder)
    _check_parameters(manifest, folder)
    check_files(folder, manifest, verify=verify)
    chosen = _dtype(dtype or manifest.dtype)
    hidden = out.with_name(f".exporting-{out.name}")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        report = _write(folder, manifest, hidden, chosen, max_shard_bytes)
        sync_folder(hidden)
        hidden.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise CheckpointError(f"{out} cannot be written: {error}") from error
    return ExportReport(out, manifest.global_steps, len(manifest.shapes), *report)


def _check_parameters(manifest: Manifest, folder: Path) -> None:
    """Raise CheckpointError unless transformers' model has just these parameters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_hf_config(manifest.model))
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    saved = manifest.shapes
    problems = [f"{name} is not in {type(model).__name__}" for name in saved if name not in wanted]
    problems += [f"{name} is not in the checkpoint" for name in wanted if name not in saved]
    problems += [
        f"{name} has shape {saved[name]}, in {type(model).__name__} {wanted[name]}"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    if problems:
        raise CheckpointError(
            f"{folder} cannot be exported, transformers would not load {len(problems)} of its "
            f"parameters: {listed(problems)}. Layers of your own can be exported if their hf_name "
            "gives every parameter the name and shape that transformers' model has"
        )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype {name!r} is unknown; use float32, bfloat16 or float16")
    return dtype


def _write(
    folder: Path, manifest: Manifest, out: Path, dtype: torch.dtype, max_shard_bytes: int
) -> tuple[int, tuple[str, ...]]:
    headers = [TensorHeader(name, dtype, shape) for name, shape in manifest.shapes.items()]
    shards = list(_split(headers, max_shard_bytes))
    names = _shard_names(len(shards))
    with PieceReader(folder, manifest) as reader:
        for name, shard in zip(names, shards, strict=True):
            # transformers refuses files that do not name their framework
            write_tensors(out / name, shard, _read(reader, shard), {"format": "pt"})
    total = sum(header.num_bytes for header in headers)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {h.name: n for n, s in zip(names, shards, strict=True) for h in s},
        }
        _write_json(out / _INDEX_FILE, index)
    _write_json(out / "config.json", {**manifest.model, "dtype": _name(dtype)})
    return total, names


def _split(headers: Sequence[TensorHeader], max_bytes: int) -> Iterator[list[TensorHeader]]:
    """Consecutive tensors of at most `max_bytes`; a larger one is alone."""
    shard: list[TensorHeader] = []
    for header in headers:
        if shard and sum(h.num_bytes for h in shard) + header.num_bytes > max_bytes:
            yield shard
            shard = []
        shard.append(header)
    yield shard


def _shard_names(count: int) -> tuple[str, ...]:
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1))


def _read(reader: PieceReader, shard: Sequence[TensorHeader]) -> Iterator[Tensor]:
    for header in shard:
        tensor = torch.empty(header.shape, dtype=header.dtype)
        reader.read(WEIGHT, header.name, 0, tensor.view(-1))
        yield tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    write_durably(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
