"""Self-test: random plans on a tiny model, compared with a plain single-process run."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plans", type=int, default=4, metavar="N", help="random plans to run")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of plans and weights"
    )


def run(args: argparse.Namespace) -> int:
    from ds_infinipipe.runtime import selftest

    return int(selftest.main(args))
