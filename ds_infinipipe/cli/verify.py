"""Self-test: random plans on a tiny model, compared with a plain single-process run."""

from __future__ import annotations

import argparse
import os

from ds_infinipipe.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="stages (default 2)")
    parser.add_argument("--sp", type=int, default=2, metavar="N", help="ranks a stage (default 2)")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="steps, each with a plan (default 3)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (default 0)")


def run(args: argparse.Namespace) -> int:
    for name in ("pp", "sp", "steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: at least 1 is needed")
    # the ranks are processes of this machine's CPU, and there may be more of them than cores
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ds_infinipipe.checks import exactness

    return int(exactness.main(args))
