"""Reading the JSON files a user gives us: whatever is wrong with one is said in one paragraph."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ds_infinipipe.errors import ConfigError

__all__ = [
    "NestedTooDeep",
    "format_close_matches",
    "is_finite_number",
    "parse_json",
    "read_json_object",
]

_MAX_DEPTH = 100
_Pairs = Callable[[list[tuple[str, Any]]], Any]


class NestedTooDeep(ValueError):
    """JSON of more than 100 levels, which no file of ours has."""

    def __init__(self) -> None:
        super().__init__(f"it is nested deeper than {_MAX_DEPTH} levels")


def parse_json(text: str | bytes, pairs_hook: _Pairs | None = None) -> Any:
    """`json.loads`; raises NestedTooDeep, a ValueError too, for more than 100 levels."""
    try:
        content = json.loads(text, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise NestedTooDeep from None
    level, depth = _containers([content]), 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise NestedTooDeep
        level = [c for n in level for c in _containers(n.values() if isinstance(n, dict) else n)]
    return content


def is_finite_number(value: Any) -> bool:
    """True for an int or float, but no bool, that a float can hold; not for NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]


def read_json_object(
    path: str | Path, what: str, *, pairs_hook: _Pairs | None = None
) -> dict[str, Any]:
    """The object in a JSON file, with or without a byte order mark.

    `what` names the file in messages, such as "the model config". Raises ConfigError for a file
    that cannot be read, is not JSON or holds something else than one object.
    """
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8-sig"), pairs_hook)
    except FileNotFoundError as error:
        # relative paths are the usual reason
        where = "" if Path(path).is_absolute() else f", seen from {Path.cwd()}"
        raise ConfigError(
            f"{what} {path} cannot be read: there is no such file{where}; give its path"
        ) from error
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} cannot be read: it is not UTF-8, {error}") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}; correct it there") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{what} {path} must hold one JSON object")
    return content


def format_close_matches(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for a likely typo, else the list of what is known."""
    names = sorted(known)
    matches = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    if matches:
        return "; did you mean " + " or ".join(repr(m) for m in matches) + "?"
    return f"; known are {', '.join(names)}" if names else ""
