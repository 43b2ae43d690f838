"""Ulysses: tensors sharded by tokens become tensors sharded by heads, and back.

Between the two all-to-alls a rank sees every token of its stage's chunk and its share of the heads.

Shapes: T tokens of the chunk, T/sp tokens of a rank, H heads, D head dimension.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.sequence.layer import _SeqAllToAll
from torch import Tensor

__all__ = ["ProcessGroup", "group_size", "to_heads", "to_tokens"]

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
    num_heads = x_THD.shape[1]
    if num_heads < sp and sp % num_heads == 0:
        x_THD = x_THD.repeat_interleave(sp // num_heads, dim=1)
    elif num_heads % sp:
        x_THD = F.pad(x_THD, (0, 0, 0, -num_heads % sp))
    scattered: Tensor = _SeqAllToAll.apply(pg, x_THD.unsqueeze(1), 2, 0, 1)
    return scattered.squeeze(1)


def to_tokens(x_THD: Tensor, pg: ProcessGroup | None, num_heads: int) -> Tensor:
    """[T, ceil(H/sp), D] back to [T/sp, H, D] for H = `num_heads`; drops the zero heads.

    Collective over `pg`. Only for tensors with at least one head per rank (queries, outputs).
    """
    if group_size(pg) == 1:
        return x_THD
    gathered: Tensor = _SeqAllToAll.apply(pg, x_THD.unsqueeze(1), 0, 2, 1)
    return gathered.squeeze(1)[:, :num_heads]
