"""What a rank and the launcher that started it tell each other through the environment."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from ds_infinipipe.errors import ConfigError

__all__ = [
    "ALLOCATOR_SETTINGS",
    "become_only_rank",
    "launched_ranks",
    "prepare_allocator",
    "tell_launcher",
]

ALLOCATOR_SETTINGS = "expandable_segments:True"


def launched_ranks() -> int | None:
    """How many ranks the launcher started, None without one; ConfigError for no such number."""
    text = os.environ.get("WORLD_SIZE")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"WORLD_SIZE is {text!r}; it must be the number of ranks: start the run with a "
            "launcher, which sets it, or unset it"
        )
    return int(text)


def become_only_rank() -> None:
    """Give this process what a launcher gives the rank of a run of one, unless one did.

    The port is a free one, so that several such processes can run beside each other.
    """
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in alone.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def prepare_allocator() -> None:
    """Choose torch's CUDA allocator before torch is imported, unless the user did.

    Chunks differ in size every step, which fragments the default one. Launchers do not hand the
    variable on to other nodes, so each rank sets it.
    """
    if not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):  # the name of earlier versions
        os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOCATOR_SETTINGS)


def tell_launcher(text: str) -> None:
    """Leave the error where torchrun looks for it, so that its last lines name the cause."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        extra = {"timestamp": str(int(time.time()))}
        body = {"message": {"message": text, "extraInfo": extra}}
        Path(file).write_text(json.dumps(body), encoding="utf-8")
