"""What is said about a word that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["format_close_matches"]


def format_close_matches(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for a likely typo, else the list of what is known."""
    names = sorted(known)
    matches = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    if matches:
        return "; did you mean " + " or ".join(repr(m) for m in matches) + "?"
    return f"; known are {', '.join(names)}" if names else ""
