"""Plan one batch of sequence lengths and say what it would take; needs no GPU and no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_infinipipe.cli.parts.inputs import (
    Question,
    add_question_arguments,
    check_folder,
    read_question,
    write_text,
)
from ds_infinipipe.cli.parts.views import add_view_arguments, check_views, explanation, write_views

if TYPE_CHECKING:
    from ds_infinipipe.planner.plan.plan import Plan

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_question_arguments(parser)
    parser.add_argument(
        "--json", metavar="OUT", help="write the plan there, of each replica where there are more"
    )
    add_view_arguments(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also print what fills the memory, the recompute map, and what a GiB is worth",
    )


def run(args: argparse.Namespace) -> int:
    check_folder("--json", args.json)
    check_views(args)
    question = read_question(args)
    plans = _search(question) if question.tries_layouts else _plan(question)
    from ds_infinipipe.viz.tables import plan_summary

    slowest = max(plans, key=lambda plan: plan.predicted.step_time_s)
    if len(plans) > 1:
        print(f"slowest of {len(plans)} replicas, number {plans.index(slowest)}:")
    print(plan_summary(slowest))
    if args.explain:
        print(f"\n{explanation(slowest, question.settings)}")
    write_views(args, slowest)
    if args.json is not None:
        _write(Path(args.json), plans)
    return 0


def _plan(question: Question) -> Sequence[Plan]:
    from ds_infinipipe.planner.search.layouts import plan_replicas

    return tuple(plan_replicas(question.lengths, question.setup, question.settings))


def _search(question: Question) -> Sequence[Plan]:
    from ds_infinipipe.planner.search.layouts import search_layouts
    from ds_infinipipe.viz.comparison import layout_table

    search = search_layouts(question.lengths, question.setup, question.settings)
    print(layout_table(search))
    print()
    return search.best.plans


def _write(path: Path, plans: Sequence[Plan]) -> None:
    for replica, plan in enumerate(plans):
        file = path
        if len(plans) > 1:
            file = path.with_name(f"{path.stem}.replica{replica}{path.suffix}")
        write_text("--json", file, plan.to_json() + "\n", "plan")
