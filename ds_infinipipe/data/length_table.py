"""How long the documents of a corpus are, as a table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["length_table"]

_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9)
_LIMITS_K = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)


def length_table(lengths: NDArray[np.int64]) -> str:
    """Count, percentiles (nearest rank), and shares of documents and tokens up to round lengths.

    `lengths` in tokens, int64 [documents], at least one.
    """
    ordered = np.sort(lengths)
    total = int(ordered.sum())
    lines = [
        f"documents  {ordered.size:,}, {total:,} tokens, mean {total / ordered.size:,.0f}, "
        f"longest {ordered[-1]:,}",
        "",
        "percentile  tokens",
    ]
    for percentile in _PERCENTILES:
        rank = max(1, int(np.ceil(percentile / 100 * ordered.size)))
        lines.append(f"{percentile:>10g}  {ordered[rank - 1]:,}")
    lines += ["", " up to  documents  tokens"]
    passed = np.concatenate([[0], np.cumsum(ordered)])
    for limit in _LIMITS_K:
        count = int(np.searchsorted(ordered, 1024 * limit, side="right"))
        lines.append(f"{limit:>5}K  {count / ordered.size:>9.2%}  {passed[count] / total:>6.2%}")
        if count == ordered.size:
            break
    return "\n".join(lines)
