"""Ulysses: tensors sharded by tokens become tensors sharded by heads, and back.

Between the two all-to-alls a rank sees every token of its stage's chunk and its share of the heads.

Shapes: T tokens of the chunk, T/sp tokens of a rank, H heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.sequence.layer import (
    _dim_zero_all_to_all,
    _SeqAllToAll,
    register_all_to_all_group,
)
from torch import Tensor

__all__ = ["ProcessGroup", "group_size", "join_to_heads", "to_heads", "to_tokens"]

ProcessGroup = dist.ProcessGroup


def group_size(pg: ProcessGroup | None) -> int:
    """Ranks of the group; no group is one rank."""
    return 1 if pg is None else dist.get_world_size(pg)


def to_heads(x_THD: Tensor, pg: ProcessGroup | None) -> Tensor:
    """[T/sp, H, D] to [T, ceil(H/sp), D]; the group's tokens follow each other by rank.

    Fewer heads than ranks (key/value heads of grouped attention) are repeated, so neighbouring
    ranks share one and its gradients add up. A number that sp does not divide is padded with zero
    heads, which sit on the last ranks; `planner.specs.make_layout` lets only multi-head attention
    come to that, where queries and keys are padded alike. Collective over `pg`.
    """
    sp = group_size(pg)
    if sp == 1:
        return x_THD
    scattered: Tensor = _SeqAllToAll.apply(pg, _fill_heads(x_THD, sp).unsqueeze(1), 2, 0, 1)
    return scattered.squeeze(1)


def join_to_heads(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pg: ProcessGroup | None
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
    joined = _dim_zero_all_to_all(pg, torch.cat(parts, dim=2)).flatten(0, 1)
    q, k, v = joined.split([part.shape[2] for part in parts], dim=1)
    return q, k, v


def _fill_heads(x_THD: Tensor, sp: int) -> Tensor:
    """Repeat or pad the heads to a multiple of sp, as `to_heads` says."""
    num_heads = x_THD.shape[1]
    if num_heads < sp and sp % num_heads == 0:
        return x_THD.repeat_interleave(sp // num_heads, dim=1)
    return F.pad(x_THD, (0, 0, 0, -num_heads % sp)) if num_heads % sp else x_THD


def to_tokens(x_THD: Tensor, pg: ProcessGroup | None, num_heads: int) -> Tensor:
    """[T, ceil(H/sp), D] back to [T/sp, H, D] for H = `num_heads`; drops the zero heads.

    Collective over `pg`. Only for tensors with at least one head per rank (queries, outputs).
    """
    if group_size(pg) == 1:
        return x_THD
    gathered: Tensor = _SeqAllToAll.apply(pg, x_THD.unsqueeze(1), 0, 2, 1)
    return gathered.squeeze(1)[:, :num_heads]
