"""Options of `plan` and `show` that write what can be seen of a plan."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ds_infinipipe.cli.parts.inputs import check_folder, write_text
from ds_infinipipe.errors import ConfigError

if TYPE_CHECKING:
    from ds_infinipipe.planner.facts.settings import PlannerSettings
    from ds_infinipipe.planner.plan.plan import Plan

__all__ = ["add_view_arguments", "check_views", "explanation", "write_views"]


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gantt",
        metavar="FILE.png|FILE.html",
        help="draw the predicted timeline; the page also has memory and recompute map",
    )
    parser.add_argument(
        "--memory-plot", metavar="FILE.png", help="draw every stage's memory over time"
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", help="write the timeline for chrome://tracing or Perfetto"
    )


def check_views(args: argparse.Namespace) -> None:
    """ConfigError for a picture that cannot be drawn or written, found before the work."""
    from ds_infinipipe.viz.figure import require_matplotlib
    from ds_infinipipe.viz.gantt import check_gantt_path

    for option, path in (
        ("--gantt", args.gantt),
        ("--memory-plot", args.memory_plot),
        ("--trace", args.trace),
    ):
        check_folder(option, path)
    if args.gantt is not None and check_gantt_path(args.gantt).suffix == ".png":
        require_matplotlib("--gantt")
    if args.memory_plot is not None and not args.memory_plot.endswith(".png"):
        raise ConfigError(f"--memory-plot {args.memory_plot}: it is written as .png")
    if args.memory_plot is not None:
        require_matplotlib("--memory-plot")


def write_views(args: argparse.Namespace, plan: Plan) -> None:
    """Write the files that were asked for, and say so."""
    from ds_infinipipe.planner.predict.simulate import forecast
    from ds_infinipipe.viz.chrome_trace import chrome_trace
    from ds_infinipipe.viz.gantt import write_gantt
    from ds_infinipipe.viz.memory import write_memory_png

    if args.gantt is None and args.memory_plot is None and args.trace is None:
        return
    timeline = forecast(plan)
    if args.gantt is not None:
        write_gantt(args.gantt, {"predicted": timeline}, plan)
        print(f"timeline written to {args.gantt}")
    if args.memory_plot is not None:
        write_memory_png(args.memory_plot, plan, timeline)
        print(f"memory over time written to {args.memory_plot}")
    if args.trace is not None:
        trace = json.dumps(chrome_trace({"predicted": timeline}, plan))
        write_text("--trace", args.trace, trace + "\n", "trace")


def explanation(plan: Plan, settings: PlannerSettings) -> str:
    """What fills the memory, what is recomputed for it, and what more memory would be worth.

    Plans the batch twice more.
    """
    from ds_infinipipe.planner.search.what_if.shadow_price import shadow_price
    from ds_infinipipe.viz.memory import memory_table
    from ds_infinipipe.viz.recompute_map import recompute_text

    price = shadow_price(plan, settings)
    return "\n\n".join([memory_table(plan), recompute_text(plan), str(price)])
