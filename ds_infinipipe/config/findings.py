"""What is wrong with a configuration, in words a user can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ds_infinipipe.json_file import format_close_matches

__all__ = ["describe_findings"]


def describe_findings(error: ValidationError, root: type[BaseModel], name: str) -> str:
    """All of pydantic's findings in one paragraph, each with its path, value and repair.

    Paths begin with `name`, which stands for the model `root`.
    """
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        found.setdefault((name, *_field_path(root, item["loc"])), []).append(item)
    return "; ".join(_describe_field(root, path, items) for path, items in found.items())


def _field_path(root: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names of the way to a field without the names pydantic adds for the members of a union."""
    names: list[str] = []
    model: type[BaseModel] | None = root
    for part in location:
        if model is None:
            break
        names.append(str(part))
        model = _section_of(model, str(part))
    return names


def _section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = model.model_fields.get(name)
    kind = None if field is None else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _describe_field(
    root: type[BaseModel], names: tuple[str, ...], items: list[Mapping[str, Any]]
) -> str:
    first, path = items[0], ".".join(names)
    if first["type"] == "extra_forbidden":
        *parents, name = names[1:]
        model = root
        for parent in parents:
            model = _section_of(model, parent) or model
        return f"{path} is unknown{format_close_matches(name, model.model_fields)}"
    reasons = dict.fromkeys(
        str(i["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
        for i in items
    )
    if first["type"] == "value_error":
        return f"{path}: {' or '.join(reasons)}"
    meaning = _meaning(root, names[1:])
    return f"{path} is {json.dumps(first['input'], default=repr)}: {' or '.join(reasons)}{meaning}"


def _meaning(root: type[BaseModel], names: Sequence[str]) -> str:
    """A field's docstring, in brackets: what to give, its unit and its default."""
    model: type[BaseModel] | None = root
    text = None
    for name in names:
        field = None if model is None else model.model_fields.get(name)
        text = None if field is None else field.description
        model = None if model is None else _section_of(model, name)
    return f" ({' '.join(text.split())})" if text else ""
