"""Where the lengths of a planning question come from."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.data.lengths import LENGTH_DISTRIBUTIONS, read_lengths, sample_lengths
from ds_infinipipe.errors import ConfigError

__all__ = ["LENGTHS_HELP", "load_lengths"]

LENGTHS_HELP = (
    "one integer a line, .npy or JSONL; or LAW:COUNT[:SEED] with a synthetic LAW: "
    + ", ".join(LENGTH_DISTRIBUTIONS)
)

_UNLIMITED = 2**40


def load_lengths(source: str, context: int | None) -> NDArray[np.int64]:
    """Lengths from a file, or drawn from a synthetic law such as "github-b:512:7"."""
    law, _, rest = source.partition(":")
    if law not in LENGTH_DISTRIBUTIONS or not rest:
        return read_lengths(source)
    match = re.fullmatch(r"(\d+)(?::(\d+))?", rest)
    if match is None or int(match[1]) < 1:
        raise ConfigError(
            f"lengths {source!r}: write LAW:COUNT or LAW:COUNT:SEED, such as {law}:512"
        )
    rng = np.random.default_rng(int(match[2] or 0))
    return sample_lengths(law, int(match[1]), context or _UNLIMITED, rng)
