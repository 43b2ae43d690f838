"""From the bytes of a document to its token ids."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.data.tokenizer import ByteTokenizer

__all__ = ["EncodingPolicy", "decode_text", "tokenize_line", "tokenize_text"]

EncodingPolicy = Literal["replace", "strict"]


def decode_text(content: bytes, policy: EncodingPolicy) -> tuple[str, bool]:
    """The text, and whether bytes had to be replaced; ValueError naming the byte under "strict"."""
    try:
        return content.decode("utf-8"), False
    except UnicodeDecodeError as error:
        if policy == "strict":
            raise ValueError(
                f"byte {error.start} (0x{content[error.start]:02x}) is not UTF-8, {error.reason}; "
                "convert the file or set encoding_errors to 'replace'"
            ) from error
        return content.decode("utf-8", "replace"), True


def tokenize_text(
    content: bytes, policy: EncodingPolicy, vocab_size: int | None
) -> tuple[NDArray[np.int64], bool]:
    """Ids of a whole text file, int64 [tokens], and whether bytes were replaced."""
    text, repaired = decode_text(content, policy)
    ids = ByteTokenizer().encode_bytes(text.encode() if repaired else content)
    _check_range(ids, vocab_size)
    return ids, repaired


def tokenize_line(
    content: bytes, text_field: str, policy: EncodingPolicy, vocab_size: int | None
) -> tuple[NDArray[np.int64], bool]:
    """Ids of a JSONL line that has `input_ids` or a text; ValueError says what is wrong with it."""
    line, repaired = decode_text(content.removeprefix(codecs.BOM_UTF8), policy)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("a JSONL line must be an object with 'input_ids' or a text")
    ids = _row_ids(row, text_field)
    _check_range(ids, vocab_size)
    return ids, repaired


def _row_ids(row: Mapping[str, Any], text_field: str) -> NDArray[np.int64]:
    if "input_ids" in row:
        ids = np.asarray(row["input_ids"] or np.empty(0, np.int64))
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError("'input_ids' must be a list of integers")
        return ids.astype(np.int64)
    text = row.get(text_field)
    if not isinstance(text, str):
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(
            f"neither 'input_ids' nor a text under {text_field!r}; the keys are {keys}: "
            "name the right one as text_field"
        )
    return ByteTokenizer().encode(text)


def _check_range(ids: NDArray[np.int64], vocab_size: int | None) -> None:
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise ValueError(f"token id {low} is negative")
    if vocab_size is not None and high >= vocab_size:
        raise ValueError(
            f"token id {high} is outside the model's vocabulary of {vocab_size}: "
            "use a larger vocab_size or other data"
        )
