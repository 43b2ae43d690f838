"""Run one recorded step alone; started once per rank by a launcher, like `train`."""

from __future__ import annotations

import argparse

from ds_infinipipe.cli.parts.overrides import apply_overrides
from ds_infinipipe.config.deepspeed import read_deepspeed_json
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.launcher import prepare_allocator

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", metavar="STEP.json", help="a plan with its .npz beside it")
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE", help="the run's JSON")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="repetitions (default 1)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the JSON")


def run(args: argparse.Namespace) -> int:
    if args.times < 1:
        raise ConfigError(f"--times {args.times}: at least 1 is needed")
    config = apply_overrides(read_deepspeed_json(args.deepspeed_config), args.overrides)
    prepare_allocator()
    from ds_infinipipe.runtime.engine.replay import replay

    replay(config, args.step, args.times)
    return 0
