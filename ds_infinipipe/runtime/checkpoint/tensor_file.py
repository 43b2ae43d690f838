"""Safetensors files written one tensor at a time: safetensors' own writer wants all at once.

A file is complete on disk, with its checksum known, when `write_tensors` returns.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

__all__ = ["TensorHeader", "hash_file", "open_new", "write_durably", "write_tensors"]

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_READ_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of a tensor before any of it is there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def write_tensors(
    path: Path,
    headers: Iterable[TensorHeader],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Write `tensors` in the order of `headers` and return the file's bytes and SHA-256.

    Only the tensor being written is on the CPU. Raises OSError as the file system does, and
    ValueError where a tensor is not what its header says.
    """
    headers = list(headers)
    digest = hashlib.sha256()
    num_bytes = 0
    with open_new(path) as file:
        for part in _parts(headers, tensors, metadata or {}):
            _write_all(file, part)
            digest.update(part)
            num_bytes += len(part)
        os.fsync(file.fileno())
    return num_bytes, digest.hexdigest()


def open_new(path: Path) -> BinaryIO:
    """An unbuffered file, so that a full disk shows where the bytes are written."""
    return open(path, "wb", buffering=0)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file and wait until the disk has it."""
    with open_new(path) as file:
        _write_all(file, memoryview(content))
        os.fsync(file.fileno())


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _parts(
    headers: list[TensorHeader], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> Iterable[memoryview]:
    yield memoryview(_header(headers, metadata))
    for header, tensor in zip(headers, tensors, strict=True):
        if tuple(tensor.shape) != header.shape or tensor.dtype != header.dtype:
            raise ValueError(
                f"{header.name} is {tensor.dtype} {tuple(tensor.shape)}, announced as "
                f"{header.dtype} {header.shape}"
            )
        # bytes by way of uint8, as numpy has no bfloat16
        content = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        yield content.data


def _header(headers: list[TensorHeader], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for header in headers:
        end = offset + header.num_bytes
        entries[header.name] = {
            "dtype": _DTYPE_NAMES[header.dtype],
            "shape": list(header.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    return len(text).to_bytes(8, "little") + text


def _write_all(file: BinaryIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]
