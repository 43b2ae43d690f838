"""What the decoder layers of a stage need to know about the chunk they run.

Shapes: T tokens of the chunk with padding, T/sp tokens of this rank, H heads, K key/value heads,
D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ds_infinipipe.errors import ScheduleError
from ds_infinipipe.ops.attention import Segments, varlen_attention
from ds_infinipipe.ops.kv_arena import SequenceArena, exchange
from ds_infinipipe.ops.ulysses import (
    ProcessGroup,
    Stopwatch,
    group_size,
    join_to_heads,
    to_heads,
    to_tokens,
)
from ds_infinipipe.planner.plan.chunks import Chunk

__all__ = ["ChunkContext", "chunk_attention", "chunk_positions", "rank_tokens"]

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def chunk_positions(chunk: Chunk) -> Tensor:
    """Position of every token, int64 [T]: slices continue their sequence, padding restarts at 0."""
    parts = [torch.arange(s.start, s.end) for s in chunk.slices]
    return torch.cat([*parts, torch.arange(chunk.padding)])


def rank_tokens(num_tokens: int, sp: int, sp_rank: int) -> slice:
    """The tokens of a padded chunk that one rank of the stage holds.

    Raises ScheduleError when the ranks cannot hold equally many.
    """
    if num_tokens % sp:
        raise ScheduleError(
            f"a chunk of {num_tokens} tokens with padding cannot be shared by sp {sp} ranks: "
            f"{-num_tokens % sp} more padding tokens are needed"
        )
    share = num_tokens // sp
    return slice(sp_rank * share, (sp_rank + 1) * share)


@dataclass(frozen=True, eq=False)
class ChunkContext:
    """Geometry, arena and rotary tables of one chunk on one stage, the same for all its layers.

    The first `split_tokens` tokens are a slice whose `context_len` earlier tokens are in `arena`;
    all others are `short_segments` (whole sequences, then the padding). `cos_sin` are the rotary
    tables [1, T/sp, D] of this rank's tokens. `sp_group` is None for sp 1. With `joins_qkv`
    query, key and value go through one all-to-all instead of three; `watch` times all of them.
    """

    split_tokens: int
    context_len: int
    short_segments: Segments | None
    arena: SequenceArena | None
    sp_group: ProcessGroup | None
    cos_sin: tuple[Tensor, Tensor]
    attention_impl: str = "auto"
    joins_qkv: bool = False
    watch: Stopwatch | None = None

    @cached_property
    def slice_segments(self) -> Segments:
        """The slice's queries over the sequence so far; only for a chunk with an arena."""
        return Segments((0, self.split_tokens), (0, self.context_len + self.split_tokens))

    @classmethod
    def from_chunk(
        cls,
        chunk: Chunk,
        arena: SequenceArena | None,
        sp_group: ProcessGroup | None,
        *,
        rotary: Rotary,
        device: torch.device | str,
        dtype: torch.dtype,
        attention_impl: str = "auto",
        joins_qkv: bool = False,
    ) -> ChunkContext:
        """`arena` belongs to the cut sequence of `chunk.slices[0]`, None if there is none.

        `rotary` is `model.hf.make_rotary`'s module; tables come in `dtype` on `device`. Raises
        ScheduleError for a missing or needless arena and for tokens that sp does not divide.
        """
        if chunk.keeps_kv != (arena is not None):
            need = "needs the arena" if chunk.keeps_kv else "has no use for an arena"
            raise ScheduleError(f"a {chunk.kind.value} chunk {need} of its first slice")
        sp_rank = 0 if sp_group is None else torch.distributed.get_rank(sp_group)
        mine = rank_tokens(chunk.padded_tokens, group_size(sp_group), sp_rank)
        positions = chunk_positions(chunk)[mine].to(device)[None]
        with torch.no_grad():
            cos, sin = rotary(torch.empty(0, device=device, dtype=dtype), positions)
        return cls(
            split_tokens=chunk.split_tokens,
            context_len=chunk.context_len,
            short_segments=_short_segments(chunk),
            arena=arena,
            sp_group=sp_group,
            cos_sin=(cos, sin),
            attention_impl=attention_impl,
            joins_qkv=joins_qkv,
        )


def _short_segments(chunk: Chunk) -> Segments | None:
    lengths = [s.length for s in (chunk.slices[1:] if chunk.keeps_kv else chunk.slices)]
    lengths += [chunk.padding] * (chunk.padding > 0)
    bounds = (0, *itertools.accumulate(lengths))
    return Segments(bounds, bounds) if lengths else None


def chunk_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    context: ChunkContext,
    layer: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of a whole chunk over this rank's tokens: [T/sp, H, D], rotated, to the same.

    The slice attends to its sequence's rows in the arena, the other segments to their own keys; a
    query to at most `window` of them.
    Collective over the sequence group.
    """
    num_heads, pg, watch = q_THD.shape[1], context.sp_group, context.watch
    if context.joins_qkv and group_size(pg) > 1:
        q, k, v = join_to_heads(q_THD, k_TKD, v_TKD, pg, watch)
        if context.arena is not None:
            # a view would keep the slice's keys and values too, which the arena holds
            q = q.clone()
    else:
        q, k, v = (to_heads(t, pg, watch) for t in (q_THD, k_TKD, v_TKD))
    cut, outs = context.split_tokens, []
    attend = partial(varlen_attention, scale=scale, impl=context.attention_impl, window=window)
    if context.arena is not None:
        keys, values = exchange(k[:cut], v[:cut], context.arena, layer, context.context_len)
        segments = context.slice_segments
        outs.append(attend(q[:cut], keys, values, segments))
    if context.short_segments is not None:
        if cut:
            # a view would keep the slice's rows, which the arena already holds, until backward
            k, v = k[cut:].clone(), v[cut:].clone()
        outs.append(attend(q[cut:], k, v, context.short_segments))
    return to_tokens(torch.cat(outs) if len(outs) > 1 else outs[0], pg, num_heads, watch)
