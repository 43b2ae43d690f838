"""Weights from Hugging Face checkpoints, and initial weights that depend on names only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.json_file import read_json_object
from ds_infinipipe.model.layers import EMBEDDING_NAME

__all__ = ["check_weights", "init_parameter", "load_weights"]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_LISTED = 10


def load_weights(
    folder: str | Path, wanted: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors named in `wanted` (name to full shape), one at a time, on the CPU.

    Each has the dtype of the file. Everything is checked before the first tensor is read; raises
    ConfigError as `check_weights` does.
    """
    return _read(check_weights(folder, wanted))


def check_weights(
    folder: str | Path, wanted: Mapping[str, Sequence[int]]
) -> Mapping[Path, Sequence[str]]:
    """Make sure that a checkpoint folder has all of `wanted`; returns the names by file.

    Reads headers only. Raises ConfigError for a folder without safetensors, for damaged or missing
    files, and with a list of all names that are missing, have another shape or are not floating
    point.
    """
    folder = Path(folder)
    location = _locate(folder)
    missing = sorted(name for name in wanted if name not in location)
    by_file: dict[Path, list[str]] = {}
    for name in sorted(set(wanted) - set(missing)):
        by_file.setdefault(folder / location[name], []).append(name)
    problems = [f"{name} is missing" for name in missing]
    for path, names in by_file.items():
        problems += _check_file(path, names, wanted)
    if problems:
        raise ConfigError(
            f"checkpoint {folder} does not fit the model, {len(problems)} of {len(wanted)} tensors "
            f"are wrong: {_listed(problems)}; {_repair(missing, location)}"
        )
    return by_file


def _locate(folder: Path) -> dict[str, str]:
    """File name of every tensor of a checkpoint folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"there is no checkpoint folder {folder}: download the model first, nothing is fetched "
            "while training"
        )
    if (folder / _INDEX_FILE).is_file():
        weight_map = _read_index(folder / _INDEX_FILE)
        absent = sorted(f for f in set(weight_map.values()) if not (folder / f).is_file())
        if absent:
            raise ConfigError(f"checkpoint {folder} lacks the files {_listed(absent)}")
        return weight_map
    if (folder / _SINGLE_FILE).is_file():
        with _open(folder / _SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), _SINGLE_FILE)
    pickled = sorted(p.name for p in folder.glob("*.bin"))
    repair = (
        f"it holds {_listed(pickled)}, which is not read: convert it with transformers' "
        "from_pretrained(folder).save_pretrained(other_folder)"
        if pickled
        else "it holds no weights at all: download the model again, or give its config as "
        "infinipipe.model.config_path to start from random weights"
    )
    raise ConfigError(f"checkpoint {folder} has no {_SINGLE_FILE} or {_INDEX_FILE}; {repair}")


def _read_index(path: Path) -> dict[str, str]:
    """File name by tensor name, of an index file."""
    weight_map = read_json_object(path, "the index").get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"the index {path} is damaged: weight_map is no object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise ConfigError(
                f"the index {path} is damaged: {name} is in {file!r}, which is no file name"
            )
    return weight_map


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged or no safetensors file: {error}") from error


def _check_file(path: Path, names: Sequence[str], wanted: Mapping[str, Sequence[int]]) -> list[str]:
    problems = []
    with _open(path) as file:
        present = set(file.keys())
        for name in names:
            if name not in present:
                problems.append(f"{name} is in the index but not in {path.name}")
                continue
            entry = file.get_slice(name)
            shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
            if shape != tuple(wanted[name]):
                problems.append(f"{name} has shape {shape}, the model {tuple(wanted[name])}")
            elif dtype not in _FLOATS:
                problems.append(f"{name} is {dtype}, not one of {', '.join(_FLOATS)}")
    return problems


def _repair(missing: Sequence[str], location: Mapping[str, str]) -> str:
    if list(missing) == ["lm_head.weight"] and EMBEDDING_NAME in location:
        return "it has tied embeddings: set tie_word_embeddings to true in the model config"
    if missing and any(name.removeprefix("model.") in location for name in missing):
        return "it was saved without its head: save the ...ForCausalLM model"
    return "use the config.json that belongs to the checkpoint"


def _read(by_file: Mapping[Path, Sequence[str]]) -> Iterator[tuple[str, Tensor]]:
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                yield name, file.get_tensor(name)


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


def init_parameter(
    name: str, tensor: Tensor, seed: int, std: float, zero_row: int | None = None
) -> None:
    """Fill `tensor` in place with what `name` starts training from.

    `name` is the Hugging Face name: norms start at one, biases at zero, all else normal with
    `std`, as in transformers. Values depend on `name`, `seed` and the full shape only, so every
    layout starts from the same model (a head tied to the embedding has its name, and its values).
    `zero_row` is the row of the padding token, which transformers zeroes in the embedding.
    """
    with torch.no_grad():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            tensor.copy_(values.normal_(0.0, std, generator=generator))
            if name == EMBEDDING_NAME and zero_row is not None:
                tensor[zero_row].zero_()
