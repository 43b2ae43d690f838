"""How attention heads are shared by the sp ranks of a stage."""

from __future__ import annotations

from ds_infinipipe.planner.specs import ModelSpec

__all__ = ["local_heads", "local_kv_heads"]


def local_heads(model: ModelSpec, sp: int) -> int:
    """Query heads per rank after the all-to-all; padded up where sp does not divide them."""
    return -(-model.num_heads // sp)


def local_kv_heads(model: ModelSpec, sp: int) -> int:
    """Key/value heads per rank: padded up like the query heads, or one copy where sp exceeds them.

    With fewer kv heads than ranks every rank holds one head, so the stage holds sp heads in all.
    """
    return -(-model.num_kv_heads // sp)
