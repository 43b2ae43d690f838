"""Check a plan file and show it: summary, memory, recompute map; needs no GPU and no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_infinipipe.cli.parts.views import add_view_arguments, check_views, write_views
from ds_infinipipe.errors import ConfigError, ScheduleError
from ds_infinipipe.json_file import parse_json

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.json", help="written by `plan --json` or a run")
    add_view_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_views(args)
    from ds_infinipipe.planner.plan.plan import Plan
    from ds_infinipipe.planner.verify.frame import verify_plan
    from ds_infinipipe.viz.memory import memory_table
    from ds_infinipipe.viz.recompute_map import recompute_text
    from ds_infinipipe.viz.tables import plan_summary

    text = _read(Path(args.plan))
    _refuse_configurations(args.plan, text)
    try:
        plan = Plan.from_json(text)
        verify_plan(plan)
    except ScheduleError as error:
        # the file is at fault here, not the planner
        raise ConfigError(f"{args.plan}: {error}") from error
    print("\n\n".join([plan_summary(plan), memory_table(plan), recompute_text(plan)]))
    write_views(args, plan)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a plan file: it is not UTF-8 text") from error


def _refuse_configurations(path: str, text: str) -> None:
    """ConfigError for a training configuration; anything else is left to the plan's own checks."""
    try:
        content = parse_json(text)
    except ValueError:
        return
    if isinstance(content, dict) and {"infinipipe", "train_batch_size"} & content.keys():
        raise ConfigError(
            f"{path} is a training configuration, not a plan: write plans with `infinipipe plan "
            "--json` or, while training, infinipipe.debug.dump_plans"
        )
