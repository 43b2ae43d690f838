"""The lower memory limit that a run which ran out of memory leaves beside its checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.json_file import read_json_object

__all__ = ["MEMORY_LIMIT_FILE", "MemoryLimit", "read_memory_limit", "write_memory_limit"]

MEMORY_LIMIT_FILE = "memory-limit.json"


@dataclass(frozen=True)
class MemoryLimit:
    """Plans keep within `limit_bytes`, as `step` (from 1) or one before has run out of memory.

    That was `lowerings` times in a row, without getting past it; `cause` is the last.
    """

    limit_bytes: int
    step: int
    lowerings: int
    cause: str


def read_memory_limit(folder: Path) -> MemoryLimit | None:
    """What stands in a folder of checkpoints; None where there is nothing.

    Raises ConfigError for a file that cannot be read or holds something else.
    """
    file = folder / MEMORY_LIMIT_FILE
    if not file.exists():
        return None
    content = read_json_object(file, "the stored memory limit")
    kinds = {"limit_bytes": int, "step": int, "lowerings": int, "cause": str}
    wrong = [name for name, kind in kinds.items() if type(content.get(name)) is not kind]
    if wrong or content.keys() != kinds.keys() or content["limit_bytes"] < 1:
        raise ConfigError(
            f"the stored memory limit {file} has other content than {', '.join(kinds)} with "
            f"numbers from 1 ({json.dumps(content)[:200]}): delete it to plan within the "
            "configured limit"
        )
    return MemoryLimit(**content)


def write_memory_limit(folder: Path, limit: MemoryLimit) -> None:
    """Put it in place of what stood there, whole or not at all; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{MEMORY_LIMIT_FILE}.{os.getpid()}"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(asdict(limit), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / MEMORY_LIMIT_FILE)
