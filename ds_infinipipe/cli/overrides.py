"""`key=value` on the command line, written into the JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ds_infinipipe.errors import ConfigError

__all__ = ["apply_overrides"]


def apply_overrides(config: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy with every "a.b=value" set; values are JSON where they parse, else plain strings.

    Raises ConfigError where there is no "=" or a key runs through something that is no object.
    """
    result = copy.deepcopy(dict(config))
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.split(".")
        if not equals or not all(names):
            raise ConfigError(f"{override!r} is not an override; write key=value, with dots in key")
        node = result
        for depth, name in enumerate(names[:-1], start=1):
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{override!r}: {'.'.join(names[:depth])} is not an object")
        node[names[-1]] = _parse(text)
    return result


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
