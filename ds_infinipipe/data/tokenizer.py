"""Bytes as tokens: every UTF-8 text has ids, nothing is downloaded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.errors import DataError

__all__ = ["ByteTokenizer"]


class ByteTokenizer:
    """Ids 0 to 255 are the bytes themselves, then bos, eos and pad, and one id that stays unused.

    Nothing is inserted by itself: the length of a text is its number of UTF-8 bytes, unless the
    reader is told to append eos. A model needs `vocab_size` ids; `padded_vocab_size` is the next
    multiple of 64 and what the shipped model configs use.
    """

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 260
    padded_vocab_size = 320

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of a text, int64 [bytes]; lone surrogates become the replacement character."""
        return self.encode_bytes(text.encode("utf-8", "replace"))

    def encode_bytes(self, content: bytes) -> NDArray[np.int64]:
        """Ids of bytes that are valid UTF-8 already, int64 [len(content)]."""
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Text of ids without the special ones; DataError for ids outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.padded_vocab_size):
            raise DataError(
                f"ids from {ids.min()} to {ids.max()} are outside the byte vocabulary of "
                f"{self.padded_vocab_size}"
            )
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")
