"""Opening files that may be compressed, by their names."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import IO, cast

from ds_infinipipe.errors import DataError

__all__ = ["JSONL_SUFFIXES", "is_packed", "open_bytes"]

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def is_packed(path: str | Path) -> bool:
    """True for a file that cannot be read from the middle."""
    return str(path).endswith((".gz", ".zst"))


def open_bytes(path: str | Path) -> IO[bytes]:
    """The content of a plain, gzip (.gz) or Zstandard (.zst) file.

    Raises OSError where it cannot be opened or is damaged, and DataError where Zstandard is not
    installed.
    """
    name = str(path)
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if name.endswith(".zst"):
        return _open_zstandard(path)
    return open(path, "rb")


def _open_zstandard(path: str | Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path} is compressed with Zstandard, which is not installed: "
            "pip install 'ds-infinipipe[data]', or unpack the file"
        ) from error
    try:
        with zstandard.open(path, "rb") as stream:
            return io.BytesIO(stream.read())
    except zstandard.ZstdError as error:
        raise OSError(f"it is no Zstandard file, or a damaged one: {error}") from error
