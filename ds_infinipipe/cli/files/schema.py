"""Print the JSON Schema of the "infinipipe" section."""

from __future__ import annotations

import argparse
import json

from ds_infinipipe.config.section import InfiniPipeConfig

__all__ = ["add_arguments", "run", "schema_text"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb has no options of its own."""


def run(args: argparse.Namespace) -> int:
    print(schema_text())
    return 0


def schema_text() -> str:
    """The schema as it stands in configs/json/."""
    return json.dumps(InfiniPipeConfig.json_schema(), indent=2)
