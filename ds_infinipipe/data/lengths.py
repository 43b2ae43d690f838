"""Sequence lengths: reading them from a file, fitting them to a context, drawing synthetic ones."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.data.packed import JSONL_SUFFIXES, open_bytes
from ds_infinipipe.errors import ConfigError, DataError

__all__ = [
    "LENGTH_DISTRIBUTIONS",
    "LengthMixture",
    "LengthPercentiles",
    "OverLength",
    "OverLengthReport",
    "cut_document",
    "fit_to_context",
    "read_lengths",
    "sample_lengths",
]

OverLength = Literal["error", "truncate", "split", "drop"]

_MAX_LENGTH = 2**40
_MIN_SAMPLE = 16
_SHORT = 8192


def read_lengths(path: str | Path) -> NDArray[np.int64]:
    """Lengths in tokens, int64 [sequences], from text, `.npy` or JSONL (also .gz and .zst).

    Text holds one integer a line; a JSONL line is an integer, or an object with `length` or
    `input_ids`. Blank lines are skipped. Raises DataError naming file and line for anything else
    and for lengths below 1.
    """
    file = Path(path)
    if str(path) and file.is_dir():
        raise DataError(f"lengths file {path} is a folder; give a file with one length a line")
    if not str(path) or not file.is_file():
        named = str(path) or "''"
        raise DataError(f"lengths file {named} does not exist")
    if file.suffix == ".npy":
        lengths = _read_npy(file)
    else:
        parse = _parse_json if file.name.endswith(JSONL_SUFFIXES) else _parse_integer
        lengths = np.array(
            [_parse_line(n, line, parse, file) for n, line in _lines(file)], np.int64
        )
    if not lengths.size:
        raise DataError(f"lengths file {file} holds no length")
    return lengths


def _read_npy(file: Path) -> NDArray[np.int64]:
    try:
        values = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"lengths file {file} is not a .npy array: {error}") from error
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        shape, kind = getattr(values, "shape", "?"), getattr(values, "dtype", "?")
        raise DataError(
            f"lengths file {file} holds an array of shape {shape} and type {kind}; "
            "one dimension of integers is needed"
        )
    for index in np.flatnonzero((values < 1) | (values > _MAX_LENGTH))[:1]:
        raise DataError(f"{file}, entry {index}: {_unusable(int(values[index]))}")
    return values.astype(np.int64)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, stripped text) of the lines that are not blank."""
    try:
        with open_bytes(file) as stream:
            for number, line in enumerate(stream, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                text = line.decode("utf-8", "replace").strip()
                if text:
                    yield number, text
    except (OSError, EOFError) as error:
        raise DataError(f"lengths file {file} cannot be read: {error}") from error


def _parse_line(number: int, line: str, parse: Callable[[str], int], file: Path) -> int:
    try:
        length = parse(line)
    except ValueError as error:
        raise DataError(f"{file}, line {number}: {error}") from error
    if not 1 <= length <= _MAX_LENGTH:
        raise DataError(f"{file}, line {number}: {_unusable(length)}")
    return length


def _unusable(length: int) -> str:
    return f"length {length} is not usable, a sequence has 1 to {_MAX_LENGTH} tokens; remove it"


def _parse_integer(line: str) -> int:
    try:
        return int(line)
    except ValueError:
        raise ValueError(f"{line[:40]!r} is not an integer; one length a line is needed") from None


def _parse_json(line: str) -> int:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError:
        raise ValueError("not JSON of a length: it is nested too deeply") from None
    if isinstance(row, dict):
        ids = row.get("input_ids")
        row = row["length"] if "length" in row else len(ids) if isinstance(ids, list) else row
    if isinstance(row, bool) or not isinstance(row, int):
        raise ValueError(
            f"{line[:40]!r} is neither an integer nor an object with an integer 'length' or a "
            "list 'input_ids'"
        )
    return row


@dataclass(frozen=True, slots=True)
class OverLengthReport:
    """What a context limit did: how many are above it, and their tokens that are not trained on."""

    policy: OverLength
    context: int
    too_long: int
    lost_tokens: int
    unit: str = "sequences"

    def __str__(self) -> str:
        if not self.too_long:
            return f"none of the {self.unit} is longer than {self.context} tokens"
        return (
            f"{self.too_long} {self.unit} are longer than {self.context} tokens, "
            f"policy '{self.policy}': {self.lost_tokens} tokens are left out"
        )


def cut_document(length: int, context: int, policy: OverLength) -> list[tuple[int, int]]:
    """(start, length) of the training sequences a document becomes.

    A piece of one token has no label and is left out. "error" keeps a long document whole, for
    the caller to complain about all of them at once.
    """
    if length <= context or policy == "error":
        return [(0, length)]
    if policy == "drop":
        return []
    if policy == "truncate":
        return [(0, context)]
    starts = range(0, length, context)
    return [(s, min(context, length - s)) for s in starts if length - s > 1]


def fit_to_context(
    lengths: Iterable[int], context: int, policy: OverLength
) -> tuple[NDArray[np.int64], OverLengthReport]:
    """Apply an over-length policy to lengths; DataError for "error" and if none is left."""
    given = np.asarray(list(lengths), dtype=np.int64)
    too_long = np.flatnonzero(given > context)
    if too_long.size and policy == "error":
        worst = int(given.argmax())
        raise DataError(
            f"{too_long.size} of {given.size} sequences are longer than the context of {context} "
            f"tokens, the longest is number {worst} with {given[worst]}: raise the context or "
            "choose the over-length policy truncate, split or drop"
        )
    kept = [n for length in given.tolist() for _, n in cut_document(length, context, policy)]
    if not kept:
        raise DataError(f"no sequence is left after dropping those above {context} tokens")
    lost = int(given.sum()) - sum(kept)
    report = OverLengthReport(policy, context, int(too_long.size), lost)
    return np.array(kept, dtype=np.int64), report


@dataclass(frozen=True, slots=True)
class LengthMixture:
    """A body, a middle and a tail; one uniform number per sample picks the part.

    `body` draws n lengths below 8192; `middle` and `tail` are bounded Pareto laws (a, low, high).
    """

    body: Callable[[int, np.random.Generator], NDArray[np.float64]]
    body_share: float
    middle: tuple[float, float, float]
    middle_share: float
    tail: tuple[float, float, float]

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        part = rng.uniform(size=n)
        return np.where(
            part < self.body_share,
            self.body(n, rng),
            np.where(
                part < self.middle_share,
                _bounded_pareto(self.middle, n, rng),
                _bounded_pareto(self.tail, n, rng),
            ),
        )


@dataclass(frozen=True, slots=True)
class LengthPercentiles:
    """A law through known (percentile, length), straight between them on a logarithmic scale."""

    points: tuple[tuple[float, float], ...]

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        percentiles, lengths = zip(*self.points, strict=True)
        at = 100.0 * rng.uniform(size=n)
        return np.asarray(np.exp(np.interp(at, percentiles, np.log(lengths))))


def _beta_body(n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    return _SHORT * rng.beta(4.0, 1.04, n)


def _lognormal_body(median: float) -> Callable[[int, np.random.Generator], NDArray[np.float64]]:
    """Log-normal with sigma 1, truncated to [32, 8192) by its inverse distribution function."""

    def draw(n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        from scipy.special import ndtr, ndtri

        low, high = ndtr(np.log(32 / median)), ndtr(np.log(_SHORT / median))
        values: NDArray[np.float64] = median * np.exp(ndtri(rng.uniform(low, high, n)))
        return values

    return draw


_K64, _M1, _M2 = 2.0**16, 2.0**20, 2.0**21

_WIKIPEDIA = (
    *((0.0, 16.0), (1, 39), (5, 67), (10, 87), (25, 146), (50, 347), (75, 862), (78.81, 1024)),
    *((89.65, 2048), (90, 2112), (95, 3720), (95.61, 4096), (98.4, 8192), (99, 10919)),
    *((99.5, 15987), (99.52, 16384), (99.87, 32768), (99.9, 37353), (99.943, 49152)),
    *((99.95, 51517), (99.972, 65536), (99.989, 98304), (99.99, 101537), (99.995, 131072)),
    *((99.998, 196608), (99.999, 262144), (100, 1823777)),
)

LENGTH_DISTRIBUTIONS: Mapping[str, LengthMixture | LengthPercentiles] = {
    "github-a": LengthMixture(_beta_body, 0.915, (8.6, _SHORT, _K64), 0.994, (0.87, _K64, _M2)),
    "github-b": LengthMixture(
        _lognormal_body(1800.0), 0.915, (1.1, _SHORT, _K64), 0.994, (1.0, _K64, _M2)
    ),
    "commoncrawl": LengthMixture(
        _lognormal_body(900.0), 0.975, (1.5, _SHORT, _K64), 0.9992, (1.3, _K64, _M1)
    ),
    "wikipedia": LengthPercentiles(_WIKIPEDIA),
}
"""Synthetic laws: github-a and github-b are fitted to published shares, the first also to the
quoted shares of tokens, the second only to those of samples; commoncrawl is a plausible guess;
wikipedia runs through percentiles that were counted over a million articles, and is synthetic
between them and beyond the last."""


def sample_lengths(
    name: str, num_sequences: int, context: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw lengths, int64 [num_sequences], capped at `context` and at least 16 tokens."""
    if name not in LENGTH_DISTRIBUTIONS:
        raise ConfigError(
            f"length distribution {name!r} is unknown; known are {', '.join(LENGTH_DISTRIBUTIONS)}"
        )
    drawn = LENGTH_DISTRIBUTIONS[name].draw(num_sequences, rng)
    return np.clip(drawn, _MIN_SAMPLE, context).astype(np.int64)


def _bounded_pareto(
    law: tuple[float, float, float], n: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    shape, low, high = law
    values: NDArray[np.float64] = low * (
        1.0 - rng.uniform(size=n) * (1.0 - (low / high) ** shape)
    ) ** (-1.0 / shape)
    return values
