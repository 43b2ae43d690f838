"""Compose a DeepSpeed JSON from the configuration groups: group=choice and key=value."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_infinipipe.config.deepspeed import check_deepspeed_settings, warn_unknown_keys
from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.errors import ConfigError

__all__ = ["add_arguments", "allow_new_keys", "compose_config", "config_text", "run"]

CONFIG_MODULE = "ds_infinipipe.configs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="OUT", help="file to write; default: print it")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="GROUP=CHOICE|KEY=VALUE",
        help="Hydra overrides; a new key without dots is added by +KEY=VALUE",
    )


def run(args: argparse.Namespace) -> int:
    config = compose_config(args.overrides)
    warn_unknown_keys(config)
    text = config_text(config)
    if args.output is None:
        print(text, end="")
        return 0
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{args.output} cannot be written: {error.strerror}") from error
    return 0


def compose_config(overrides: Sequence[str], name: str = "train") -> dict[str, Any]:
    """The composed JSON, validated; ConfigError for unknown groups, choices and keys."""
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            composed = compose(name, overrides=allow_new_keys(overrides))
            config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    assert isinstance(config, dict)
    settings = {str(key): value for key, value in config.items()}
    InfiniPipeConfig.from_deepspeed(settings)
    check_deepspeed_settings(settings)
    return settings


def allow_new_keys(overrides: Sequence[str]) -> list[str]:
    """Let dotted keys name fields that no group sets, which Hydra takes only behind "++".

    Nothing is lost by it: the composed section is validated field by field.
    """
    own = re.compile(r"(?!hydra\.|sweep\.)\w+(\.\w+)+=")
    return ["++" + text if own.match(text) else text for text in overrides]


def config_text(config: dict[str, Any]) -> str:
    """The JSON as it is written to files."""
    return json.dumps(config, indent=2) + "\n"
