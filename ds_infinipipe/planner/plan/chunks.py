"""Slices of sequences and the chunks they make. Frozen, pure data.

Indices are 0-based, lengths are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Chunk", "ChunkKind", "SequenceGroup", "Slice"]


class ChunkKind(str, Enum):
    """The paper's three kinds (III-A1); here any slice, not only a tail, may make a hybrid."""

    SPLIT = "split"
    BATCHED = "batched"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Slice:
    """Contiguous tokens `[start, start + length)` of sequence number `sequence` of the batch."""

    sequence: int
    start: int
    length: int
    is_tail: bool

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_whole(self) -> bool:
        """True when the sequence was not cut."""
        return self.start == 0 and self.is_tail


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slices that run together; DeepSpeed's micro-batch.

    Only `slices[0]` may belong to a cut sequence; all others are whole sequences. `padding`
    tokens follow the last slice as a segment of their own, so no real token ever attends to them.
    """

    slices: tuple[Slice, ...]
    padding: int = 0

    @property
    def tokens(self) -> int:
        """Real tokens, without padding."""
        return sum(s.length for s in self.slices)

    @property
    def padded_tokens(self) -> int:
        return self.tokens + self.padding

    @property
    def keeps_kv(self) -> bool:
        """True when `slices[0]` is part of a cut sequence, whose K/V live in an arena.

        Deviation: the paper writes (1 - I_k) for this flag and defines I_k the other way round.
        """
        return not self.slices[0].is_whole

    @property
    def context_len(self) -> int:
        """Tokens of earlier slices that `slices[0]` attends to; the paper's C_k."""
        return self.slices[0].start

    @property
    def split_tokens(self) -> int:
        """Tokens of the cut sequence's slice, 0 for a batched chunk."""
        return self.slices[0].length if self.keeps_kv else 0

    @property
    def longest_segment(self) -> int:
        """Most tokens that attend to each other, padding being a segment too."""
        return max(self.padding, max(s.length for s in self.slices))

    @property
    def kind(self) -> ChunkKind:
        if not self.keeps_kv:
            return ChunkKind.BATCHED
        return ChunkKind.SPLIT if len(self.slices) == 1 else ChunkKind.HYBRID


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Chunks that share one 1F1B pipeline, in forward order (the paper's S_P)."""

    chunks: tuple[int, ...]
    num_split: int
