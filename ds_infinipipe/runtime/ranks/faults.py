"""Telling that a peer failed from what gloo, NCCL and the rendezvous store raise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as torch_dist

from ds_infinipipe.errors import PeerTimeoutError

__all__ = ["check_all_took_part", "is_peer_failure", "naming_peer_failures", "transport_reason"]

_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "store")

# gloo puts its source file before the reason and advice after it
_GLOO_REASON = re.compile(r"^(?:\[[^]]*\] )?(.*?)(?:\. This is typically caused.*)?$", re.DOTALL)


def is_peer_failure(error: BaseException) -> bool:
    """True for a transport's error: a peer that died, never came or did not answer in time."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)


def transport_reason(error: BaseException) -> str:
    """What the transport says happened, in a line, without source lines and advice."""
    match = _GLOO_REASON.match(str(error))
    reason = match.group(1) if match else str(error)
    return reason.strip().splitlines()[0] if reason.strip() else type(error).__name__


@contextmanager
def naming_peer_failures(what: str) -> Iterator[None]:
    """Turn a transport's error in the body into PeerTimeoutError that says what failed."""
    try:
        yield
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        raise PeerTimeoutError(
            f"{what} failed: {transport_reason(error)}. Another rank ended or did not answer in "
            "time; look at the first rank that failed"
        ) from error


def check_all_took_part(count: float, what: str) -> None:
    """Raise PeerTimeoutError unless `count`, a sum of ones over all ranks, is their number.

    A kernel of NCCL that is aborted ends like one that is done, and leaves anything behind.
    """
    if count != torch_dist.get_world_size():
        raise PeerTimeoutError(
            f"the ranks did not end the {what} together, another one failed before: their count "
            f"is {count:g} instead of {torch_dist.get_world_size()}"
        )
