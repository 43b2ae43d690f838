"""`key=value` on the command line, written into the JSON."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.json_file import NestedTooDeep, parse_json

__all__ = ["apply_overrides"]

_MAX_NAMES = 20


def apply_overrides(config: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy with every "a.b=value" set; values are JSON where they parse, else plain strings.

    Raises ConfigError where there is no "=" or a key runs through something that is no object.
    """
    result = copy.deepcopy(dict(config))
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.split(".")
        if not equals or not all(names) or len(names) > _MAX_NAMES:
            raise ConfigError(f"{override!r} is not an override; write key=value, with dots in key")
        node = result
        for depth, name in enumerate(names[:-1], start=1):
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{override!r}: {'.'.join(names[:depth])} is not an object")
        try:
            node[names[-1]] = parse_json(text)
        except NestedTooDeep as error:
            raise ConfigError(f"the value of override {key} is no setting: {error}") from error
        except ValueError:
            node[names[-1]] = text
    return result
