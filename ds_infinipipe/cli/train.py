"""Train from a DeepSpeed JSON; started once per rank by a launcher."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ds_infinipipe.cli.parts.overrides import apply_overrides
from ds_infinipipe.config.deepspeed import (
    check_deepspeed_settings,
    read_deepspeed_json,
    require_optimizer,
)
from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.launcher import become_only_rank, launched_ranks, prepare_allocator
from ds_infinipipe.planner.facts.setup import make_layout

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
    _check(config, _world_size())
    prepare_allocator()
    from ds_infinipipe.runtime.engine.train import train

    train(config)
    return 0


def _check(config: dict[str, Any], world_size: int | None) -> None:
    """What can be found without torch is found on every rank at once, in a second."""
    section = InfiniPipeConfig.from_deepspeed(config)
    spec = section.model.load_spec()
    section.load_cluster()
    check_deepspeed_settings(config)
    parallel = section.parallel
    if world_size is not None:
        make_layout(spec, *parallel.resolve(world_size))
    else:
        make_layout(spec, parallel.pp, 1 if parallel.sp == "auto" else parallel.sp, parallel.dp)
    require_optimizer(config)


def _world_size() -> int | None:
    """Ranks the launcher started, None where only MPI knows; without a launcher this is the one."""
    given = launched_ranks()
    if given is not None:
        return given
    if any(name.startswith(("OMPI_", "PMI_", "MV2_")) for name in os.environ):
        return None
    become_only_rank()
    return 1
