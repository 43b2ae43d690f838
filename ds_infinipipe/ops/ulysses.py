"""Ulysses: tensors sharded by tokens become tensors sharded by heads, and back.

Between the two all-to-alls a rank sees every token of its stage's chunk and its share of the heads.

Shapes: T tokens of the chunk, T/sp tokens of a rank, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.sequence.layer import (
    _dim_zero_all_to_all,
    _SeqAllToAll,
    register_all_to_all_group,
)
from torch import Tensor

__all__ = ["ProcessGroup", "Stopwatch", "group_size", "join_to_heads", "to_heads", "to_tokens"]

ProcessGroup = dist.ProcessGroup


class Stopwatch(Protocol):
    """Is told when an exchange starts and when it is over, in forward and in backward."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


def group_size(pg: ProcessGroup | None) -> int:
    """Ranks of the group; no group is one rank."""
    return 1 if pg is None else dist.get_world_size(pg)


def to_heads(x_THD: Tensor, pg: ProcessGroup | None, watch: Stopwatch | None = None) -> Tensor:
    """[T/sp, H, D] to [T, ceil(H/sp), D]; the group's tokens follow each other by rank.

    Fewer heads than ranks (key/value heads of grouped attention) are repeated, so neighbouring
    ranks share one and its gradients add up. A number that sp does not divide is padded with zero
    heads, which sit on the last ranks; `make_layout` lets only multi-head attention come to
    that, where queries and keys are padded alike. Collective over `pg`.
    """
    sp = group_size(pg)
    if sp == 1:
        return x_THD
    filled = _fill_heads(x_THD, sp).unsqueeze(1)
    return _timed(lambda: _SeqAllToAll.apply(pg, filled, 2, 0, 1), watch).squeeze(1)


def join_to_heads(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    pg: ProcessGroup | None,
    watch: Stopwatch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`to_heads` of query, key and value in one all-to-all, and one in backward.

    The results are views of one buffer, which any of them keeps alive. Collective over `pg`.
    """
    sp = group_size(pg)
    if pg is None or sp == 1:
        return q_THD, k_TKD, v_TKD
    register_all_to_all_group(pg)
    # [sp, T/sp, heads of that rank, D] each, so that joining them is the only copy
    parts = [
        _fill_heads(x, sp).unflatten(1, (sp, -1)).transpose(0, 1) for x in (q_THD, k_TKD, v_TKD)
    ]
    together = torch.cat(parts, dim=2)
    joined = _timed(lambda: _dim_zero_all_to_all(pg, together), watch).flatten(0, 1)
    q, k, v = joined.split([part.shape[2] for part in parts], dim=1)
    return q, k, v


def _fill_heads(x_THD: Tensor, sp: int) -> Tensor:
    """Repeat or pad the heads to a multiple of sp, as `to_heads` says."""
    num_heads = x_THD.shape[1]
    if num_heads < sp and sp % num_heads == 0:
        return x_THD.repeat_interleave(sp // num_heads, dim=1)
    return F.pad(x_THD, (0, 0, 0, -num_heads % sp)) if num_heads % sp else x_THD


def to_tokens(
    x_THD: Tensor, pg: ProcessGroup | None, num_heads: int, watch: Stopwatch | None = None
) -> Tensor:
    """[T, ceil(H/sp), D] back to [T/sp, H, D] for H = `num_heads`; drops the zero heads.

    Collective over `pg`. Only for tensors with at least one head per rank (queries, outputs).
    """
    if group_size(pg) == 1:
        return x_THD
    gathered = _timed(lambda: _SeqAllToAll.apply(pg, x_THD.unsqueeze(1), 0, 2, 1), watch)
    return gathered.squeeze(1)[:, :num_heads]


def _timed(exchange: Callable[[], Tensor], watch: Stopwatch | None) -> Tensor:
    """The exchange, around which and around whose backward `watch` is started and stopped."""
    if watch is None:
        return exchange()
    watch.start()
    result = exchange()
    watch.stop()
    if result.grad_fn is not None:
        result.grad_fn.register_prehook(lambda *_: watch.start())
        result.grad_fn.register_hook(lambda *_: watch.stop())
    return result
