"""Train from a DeepSpeed JSON; started once per rank by a launcher.

deepspeed --num_accelerators 4 --module ds_infinipipe train --deepspeed_config run.json
"""

from __future__ import annotations

import argparse

from ds_infinipipe.cli.overrides import apply_overrides
from ds_infinipipe.config import InfiniPipeConfig
from ds_infinipipe.deepspeed_json import read_deepspeed_json, sequences_per_step

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        required=True,
        metavar="FILE",
        help="DeepSpeed JSON with an infinipipe section",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps, instead of infinipipe.training.steps",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="dotted key of the JSON and its new value, such as infinipipe.planner.recompute=full",
    )


def run(args: argparse.Namespace) -> int:
    config = read_deepspeed_json(args.deepspeed_config)
    overrides = list(args.overrides)
    if args.steps is not None:
        overrides.append(f"infinipipe.training.steps={args.steps}")
    config = apply_overrides(config, overrides)
    # found before torch is loaded, and so on every rank at once
    InfiniPipeConfig.from_deepspeed(config).model.load_spec()
    sequences_per_step(config)
    from ds_infinipipe.runtime.train import train

    train(config)
    return 0
