"""Make all ranks see the same error, so that none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as torch_dist

from ds_infinipipe import errors
from ds_infinipipe.errors import InfiniPipeError

__all__ = ["raise_together"]


@contextmanager
def raise_together(what: str, pg: Any = None) -> Iterator[None]:
    """Run the body on every rank; if it fails anywhere, every rank raises the first rank's error.

    Only for bodies without collectives, or whose collectives all ranks reach or none. `pg` is a
    group of all ranks that can exchange objects; None takes the default one.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # re-raised below on this rank, and as a copy on the others
        failure = error
    found = _exchange(failure, pg)
    if failure is not None:
        raise failure
    for rank, name, message in found:
        kind = getattr(errors, name, InfiniPipeError)
        raise kind(f"{what}, rank {rank}: {message}")


def _exchange(failure: Exception | None, pg: Any) -> list[tuple[int, str, str]]:
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return []
    mine = None if failure is None else (type(failure).__name__, str(failure))
    everyone: list[tuple[str, str] | None] = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, mine, group=pg)
    return [(rank, *entry) for rank, entry in enumerate(everyone) if entry is not None]
