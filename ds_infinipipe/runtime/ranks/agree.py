"""Make all ranks see the same error, so that none is left waiting in a collective."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from ds_infinipipe import errors
from ds_infinipipe.errors import ConfigError, InfiniPipeError
from ds_infinipipe.runtime.ranks.faults import naming_peer_failures
from ds_infinipipe.runtime.ranks.last_words import refer

__all__ = ["check_same_config", "check_writable", "raise_together", "refusing"]


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
        if found and found[0][1:] == _describe(failure):
            refer(failure, found[0][0])
        raise failure
    for rank, name, message in found:
        kind = getattr(errors, name, InfiniPipeError)
        raise refer(kind(f"{what}, rank {rank}: {message}"), rank)


def check_same_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank unless all of them hold the same configuration.

    A collective. Different learning rates or step counts would train apart, or hang, silently.
    """
    if torch_dist.get_world_size() == 1:
        return
    mine = {name: json.dumps(value, sort_keys=True, default=repr) for name, value in _flat(config)}
    everyone: list[dict[str, str]] = [{}] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        names = sorted(n for n in {*everyone[0], *other} if everyone[0].get(n) != other.get(n))
        if names:
            values = (everyone[0].get(names[0], "absent"), other.get(names[0], "absent"))
            error = ConfigError(
                f"ranks 0 and {rank} have different configurations: {names[0]} is {values[0]} and "
                f"{values[1]} ({len(names)} keys differ); give every rank the same file"
            )
            raise refer(error, 0)


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, here)
        else:
            yield here, value


def check_writable(folder: str, setting: str) -> None:
    """Raise ConfigError on every rank unless rank 0 can write into `folder`; a collective."""
    with raise_together(setting):
        if torch_dist.get_rank() == 0:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise ConfigError(
                    f"{setting} is {folder!r}, where nothing can be written: {error}"
                ) from error


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn DeepSpeed's and torch's refusal of a setting into ConfigError.

    They raise whatever is at hand for a bad configuration; all ranks run the same code on the same
    configuration, so all of them get here.
    """
    try:
        yield
    except InfiniPipeError:
        raise
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{what}: DeepSpeed or torch refuses the configuration: {reason}") from (
            error
        )


def _exchange(failure: Exception | None, pg: Any) -> list[tuple[int, str, str]]:
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return []
    mine = None if failure is None else _describe(failure)
    everyone: list[tuple[str, str] | None] = [None] * torch_dist.get_world_size()
    with naming_peer_failures("agreeing with the other ranks"):
        torch_dist.all_gather_object(everyone, mine, group=pg)
    return [(rank, *entry) for rank, entry in enumerate(everyone) if entry is not None]


def _describe(failure: Exception) -> tuple[str, str]:
    return type(failure).__name__, str(failure)
