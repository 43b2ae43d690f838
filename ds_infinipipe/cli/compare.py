"""Compare our plan of a batch with other systems, all in one simulator and memory model."""

from __future__ import annotations

import argparse
import csv
import io
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ds_infinipipe.cli.parts.inputs import (
    Question,
    add_question_arguments,
    check_folder,
    read_question,
    write_text,
)
from ds_infinipipe.errors import ConfigError, InfeasiblePlanError

if TYPE_CHECKING:
    from ds_infinipipe.baselines.registry import BaselineResult, Workload
    from ds_infinipipe.planner.facts.setup import Layout

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_question_arguments(parser)
    parser.add_argument(
        "--systems",
        metavar="A,B",
        help="only these, and ours: seq1f1b, dapple, gpipe, deepspeed, flexsp, megatron, "
        "without-balanced-chunking, without-checkpointing, full-checkpointing",
    )
    parser.add_argument("--csv", metavar="OUT", help="write the table as CSV")
    parser.add_argument("--json", metavar="OUT", help="write question and results as JSON")
    parser.add_argument("--plot", metavar="OUT", help="draw step times as bars (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    for option in ("csv", "json", "plot"):
        check_folder(f"--{option}", getattr(args, option))
    if args.plot is not None:
        from ds_infinipipe.viz.figure import require_matplotlib

        require_matplotlib("--plot")
    question = read_question(args, has_default_layout=True)
    from ds_infinipipe.baselines.registry import BASELINES, compare
    from ds_infinipipe.viz.comparison import comparison_table, draw_comparison

    names = _names(args.systems, tuple(BASELINES))
    workload = _workload(question)
    results = compare(workload, names)
    if not any(result.feasible for result in results):
        raise InfeasiblePlanError(
            f"nothing of what was compared fits the memory; {results[0].name}: {results[0].note}"
        )
    print(comparison_table(workload, results))
    if args.csv is not None:
        write_text("--csv", args.csv, _csv(results), "table")
    if args.json is not None:
        write_text("--json", args.json, _json(args, workload, results), "results")
    if args.plot is not None:
        draw_comparison(workload, results, args.plot)
        print(f"plot written to {args.plot}")
    return 0


def _names(given: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return known
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--systems: {name!r} is not one of {', '.join(known)}")
    return ("ours", *names)


def _workload(question: Question) -> Workload:
    from ds_infinipipe.baselines.registry import Workload
    from ds_infinipipe.planner.search.layouts import possible_layouts

    setup = question.setup
    others: tuple[Layout, ...] = ()
    if question.tries_layouts:
        others = possible_layouts(setup.model, setup.cluster.num_devices)
        nodes = [o for o in others if o.sp == setup.cluster.devices_per_node]
        setup = replace(setup, layout=max(nodes or others, key=lambda o: o.pp))
    return Workload(question.lengths, setup, question.settings, others)


def _rows(results: tuple[BaselineResult, ...]) -> list[dict[str, object]]:
    ours_s = results[0].step_time_s
    return [
        {**asdict(r), "ratio_to_ours": r.step_time_s / ours_s if r.feasible and ours_s else None}
        for r in results
    ]


def _csv(results: tuple[BaselineResult, ...]) -> str:
    rows = _rows(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _json(args: argparse.Namespace, workload: Workload, results: tuple[BaselineResult, ...]) -> str:
    setup = workload.setup.to_json()
    content = {
        "lengths": args.lengths,
        "context": args.context,
        "num_sequences": len(workload.lengths),
        "num_tokens": workload.num_tokens,
        **setup,
        "layout": "auto" if workload.other_layouts else setup["layout"],
        "settings": workload.settings.model_dump(),
        "results": _rows(results),
    }
    return json.dumps(content, indent=2) + "\n"
