"""Which files a corpus consists of: sorted, without links, hidden folders and foreign suffixes."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ds_infinipipe.data.packed import JSONL_SUFFIXES
from ds_infinipipe.errors import DataError

__all__ = ["JSONL_PATTERNS", "PYTHON_SOURCES", "TEXT_PATTERNS", "FileScan", "scan_files"]

PYTHON_SOURCES = "python-sources"

JSONL_PATTERNS = tuple(f"*{suffix}" for suffix in JSONL_SUFFIXES)

_TEXT_SUFFIXES = (
    "txt md rst tex html css py pyi pyx c h cc cpp hpp cu cuh java js jsx ts tsx go rs rb sh pl "
    "scala kt swift lua jl r sql toml yaml yml cfg ini"
)
TEXT_PATTERNS = tuple(f"*.{suffix}" for suffix in _TEXT_SUFFIXES.split(" "))

_FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class FileScan:
    """Files to read, and what the search left out.

    `names[i]` is `files[i]` relative to the folder it was found in: equal on machines that hold
    the same folder at different places.
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    unmatched: int
    links: int
    hidden_folders: int


@dataclass(slots=True)
class _Counts:
    unmatched: int = 0
    links: int = 0
    hidden_folders: int = 0


def scan_files(paths: Sequence[str], patterns: Sequence[str]) -> FileScan:
    """All regular files under `paths` that match a pattern, by path; a file itself always counts.

    Left out and counted: symbolic links, folders whose name starts with a dot, other suffixes.
    Raises DataError for a path that does not exist.
    """
    counts = _Counts()
    found: list[tuple[str, str]] = []
    for path in paths:
        if path == PYTHON_SOURCES:
            for root, skip in _python_roots():
                found += sorted(_walk(root, ("*.py",), skip, counts))
        elif os.path.isdir(path):
            found += sorted(_walk(path, patterns, frozenset(), counts))
        elif os.path.isfile(path):
            found.append((os.path.basename(path), path))
        else:
            raise DataError(
                f"data path {path!r} is neither a file nor a folder here; give an existing one or "
                f'"{PYTHON_SOURCES}"'
            )
    names, files = tuple(n for n, _ in found), tuple(f for _, f in found)
    return FileScan(files, names, counts.unmatched, counts.links, counts.hidden_folders)


def _python_roots() -> list[tuple[str, frozenset[str]]]:
    """The running interpreter's standard library and its installed packages."""
    paths = sysconfig.get_paths()
    stdlib = paths["stdlib"]
    roots = [(stdlib, _FOREIGN_FOLDERS)]
    packages = dict.fromkeys(os.path.realpath(paths[name]) for name in ("purelib", "platlib"))
    roots += [(path, frozenset()) for path in packages]
    existing = [(path, skip) for path, skip in roots if os.path.isdir(path)]
    if not existing:
        raise DataError(f"this interpreter keeps no sources at {stdlib}: give another data path")
    return existing


def _walk(
    root: str, patterns: Sequence[str], skip: frozenset[str], counts: _Counts
) -> Iterator[tuple[str, str]]:
    """(name relative to root, path) of matching files, in no particular order."""
    for folder, folders, files in os.walk(root, onerror=_fail):
        kept = []
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                counts.links += 1
            elif name.startswith("."):
                counts.hidden_folders += 1
            elif name not in skip and name != "__pycache__":
                kept.append(name)
        folders[:] = kept
        for name in files:
            path = os.path.join(folder, name)
            if not any(fnmatch(name, pattern) for pattern in patterns):
                counts.unmatched += 1
            elif os.path.islink(path):
                counts.links += 1
            elif os.path.isfile(path):
                yield Path(path).relative_to(root).as_posix(), path


def _fail(error: OSError) -> None:
    raise DataError(f"data folder {error.filename} cannot be read: {error.strerror}") from error
