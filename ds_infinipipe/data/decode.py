"""From the bytes of a document to its token ids and labels."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.data.tokenizer import ByteTokenizer

__all__ = ["EncodingPolicy", "Tokens", "decode_text", "tokenize_line", "tokenize_text"]

EncodingPolicy = Literal["replace", "strict"]

_IGNORED = -100
_MAX_ID = 2**62
# what other programs write beside the ids
_UNSUPPORTED = ("loss_mask",)


class Tokens(NamedTuple):
    """A document: `ids` int64 [tokens]; `labels` int64 and `weights` float64 [tokens] where its
    line has them.

    Neither is shifted: `labels[t]` stands at the token it is for, -100 where there is none, and
    `weights[t]` is the weight of that token's loss.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    is_repaired: bool
    weights: NDArray[np.float64] | None = None

    @property
    def has_label(self) -> bool:
        """The first token is never predicted."""
        counts = np.ones(len(self.ids), dtype=bool)
        if self.labels is not None:
            counts &= self.labels != _IGNORED
        if self.weights is not None:
            counts &= self.weights > 0
        return bool(counts[1:].any())


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


def tokenize_text(content: bytes, policy: EncodingPolicy, vocab_size: int | None) -> Tokens:
    """A whole text file."""
    text, repaired = decode_text(content, policy)
    ids = ByteTokenizer().encode_bytes(text.encode() if repaired else content)
    _check_range(ids, vocab_size)
    return Tokens(ids, None, repaired)


def tokenize_line(
    content: bytes, text_field: str, policy: EncodingPolicy, vocab_size: int | None
) -> Tokens:
    """A JSONL line that has `input_ids`, maybe with `labels` and `loss_weights`, or a text.

    Raises ValueError saying what is wrong with it.
    """
    line, repaired = decode_text(content.removeprefix(codecs.BOM_UTF8), policy)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError:
        raise ValueError("not JSON of a document: it is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("a JSONL line must be an object with 'input_ids' or a text")
    if "input_ids" not in row:
        ids = _encode_text(row, text_field)
        _check_range(ids, vocab_size)
        return Tokens(ids, None, repaired)
    for name in _UNSUPPORTED:
        if row.get(name) is not None:
            raise ValueError(
                f"{name!r} is not supported: give 'labels', a list as long as 'input_ids' with "
                "-100 at the tokens that are not trained on, or 'loss_weights'"
            )
    ids = _integers(row, "input_ids")
    _check_range(ids, vocab_size)
    labels = weights = None
    if row.get("labels") is not None:
        labels = _integers(row, "labels")
        if len(labels) != len(ids):
            raise ValueError(
                f"{len(ids)} 'input_ids' but {len(labels)} 'labels': give one label a token, not "
                "shifted, -100 where there is none"
            )
        _check_range(labels[labels != _IGNORED], vocab_size, "label")
    if row.get("loss_weights") is not None:
        weights = _weights(row["loss_weights"], len(ids))
    return Tokens(ids, labels, repaired, weights)


def _weights(values: Any, num_tokens: int) -> NDArray[np.float64]:
    if not isinstance(values, list) or len(values) != num_tokens:
        count = len(values) if isinstance(values, list) else _shorten(values)
        raise ValueError(
            f"{num_tokens} 'input_ids' but 'loss_weights' is {count}: give one number a token, not "
            "shifted"
        )
    for index, value in enumerate(values):
        if type(value) not in (int, float) or not 0.0 <= value < math.inf:
            raise ValueError(
                f"'loss_weights' must be finite numbers of at least 0, entry {index} is "
                f"{_shorten(value)}"
            )
    return np.array(values, dtype=np.float64)


def _encode_text(row: Mapping[str, Any], text_field: str) -> NDArray[np.int64]:
    if text_field not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(
            f"neither 'input_ids' nor a text under {text_field!r}; the keys are {keys}: "
            "name the right one as text_field"
        )
    text = row[text_field]
    if not isinstance(text, str):
        raise ValueError(f"{text_field!r} is {_shorten(text)}, which is no text")
    return ByteTokenizer().encode(text)


def _integers(row: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    values = row[name]
    if not isinstance(values, list):
        raise ValueError(f"{name!r} must be a list of integers, it is {_shorten(values)}")
    for index, value in enumerate(values):
        if type(value) is not int or abs(value) > _MAX_ID:
            raise ValueError(
                f"{name!r} must be a list of integers, entry {index} is {_shorten(value)}"
            )
    return np.array(values, dtype=np.int64)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_range(ids: NDArray[np.int64], vocab_size: int | None, what: str = "token id") -> None:
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise ValueError(
            f"{what} {low} is negative: ids start at 0, and -100 in 'labels' marks tokens that are "
            "not trained on"
        )
    if vocab_size is not None and high >= vocab_size:
        raise ValueError(
            f"{what} {high} is outside the model's vocabulary of {vocab_size}: "
            "use a larger vocab_size or other data"
        )
