"""Train from a DeepSpeed JSON; started once per rank by a launcher."""

from __future__ import annotations

import argparse
import os
import socket

from ds_infinipipe.cli.overrides import apply_overrides
from ds_infinipipe.config import InfiniPipeConfig, derive_deepspeed_config
from ds_infinipipe.deepspeed_json import read_deepspeed_json

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
    # what can be found without torch is found on every rank at once, in a second
    section = InfiniPipeConfig.from_deepspeed(config)
    section.model.load_spec()
    section.load_cluster()
    world_size = _world_size()
    if world_size is not None:
        derive_deepspeed_config(config, world_size)
    from ds_infinipipe.runtime.train import train

    train(config)
    return 0


def _world_size() -> int | None:
    """Ranks the launcher started, None where only MPI knows; without a launcher this is the one."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if any(name.startswith(("OMPI_", "PMI_", "MV2_")) for name in os.environ):
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in alone.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return 1
