"""The quadratic term of Eq. 1 where some or all layers see a window of keys only.

All tokens of a sequence before position x have an area A(x): x^2 under a causal mask, which is
twice the pairs of query and key but for the diagonal. In a window of w keys the same count grows by
2 w a token from x = w on. A slice [s, e) has A(e) - A(s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.plan.chunks import Chunk

__all__ = ["CAUSAL", "AttentionArea", "chunk_sizes"]

Floats = NDArray[np.float64]
Tokens = TypeVar("Tokens", int, float, NDArray[np.int64], Floats)


@dataclass(frozen=True, slots=True)
class AttentionArea:
    """Area of the mean layer: `window_layers` of `num_layers` see `window` keys, 0 for all.

    Deviation: Eq. 1 has no windows. Where only some layers have one, stages differ; they are
    counted alike, by the mean.
    """

    window: int = 0
    window_layers: int = 0
    num_layers: int = 1

    @classmethod
    def of(cls, model: ModelSpec) -> AttentionArea:
        return cls(model.sliding_window, model.window_layers, model.num_layers)

    @property
    def share(self) -> float:
        """Of the layers that have a window."""
        return self.window_layers / self.num_layers if self.window else 0.0

    def before(self, tokens: Tokens) -> Tokens:
        """A(x) of positions x, a whole number; numbers or arrays."""
        whole = tokens * tokens
        if not self.window or not self.window_layers:
            return whole
        seen = np.minimum(tokens, self.window)
        area = seen * (2 * tokens - seen)
        if self.window_layers < self.num_layers:
            rest = self.num_layers - self.window_layers
            area = (self.window_layers * area + rest * whole) // self.num_layers
        return int(area) if isinstance(tokens, int) else area

    def per_token(self, tokens: float) -> float:
        """A(x) / x of a sequence of x tokens, at least one; x itself under a causal mask."""
        return self.before(tokens) / tokens if self.share else tokens

    def of_chunk(self, chunk: Chunk) -> int:
        """Without padding."""
        return sum(self.before(s.end) - self.before(s.start) for s in chunk.slices)

    def place(self, share: float, quadratic: float, linear: float) -> float:
        """The x with quadratic A(x) + linear x = share, in closed form; `share` is at least 0."""
        if self.window and share > (quadratic * self.window + linear) * self.window:
            # from there on A(x) = (1 - s) x^2 + s (2 w x - w^2) for a share s of windowed layers
            share += quadratic * self.share * self.window * self.window
            linear += 2 * quadratic * self.share * self.window
            quadratic *= 1 - self.share
        return 2 * share / (linear + math.sqrt(linear * linear + 4 * quadratic * share))


CAUSAL = AttentionArea()


def chunk_sizes(chunks: Sequence[Chunk], area: AttentionArea = CAUSAL) -> tuple[Floats, Floats]:
    """Tokens and areas, padding included."""
    tokens = np.array([c.padded_tokens for c in chunks], dtype=np.float64)
    areas = [area.of_chunk(c) + area.before(c.padding) for c in chunks]
    return tokens, np.array(areas, dtype=np.float64)
