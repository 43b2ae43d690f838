"""Plan one batch of sequence lengths and say what it would take; needs no GPU and no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ds_infinipipe.cli.sources import LENGTHS_HELP, load_lengths
from ds_infinipipe.config import InfiniPipeConfig
from ds_infinipipe.data.lengths import fit_to_context
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.settings import PlannerSettings
from ds_infinipipe.planner.specs import (
    BUILTIN_CLUSTERS,
    BUILTIN_MODELS,
    load_cluster,
    load_model,
    make_layout,
)

__all__ = ["add_arguments", "run"]

# option -> field of PlannerSettings
_SETTINGS = {
    "mode": "mode",
    "memory_gib": "memory_limit_gib",
    "max_slices": "max_slices",
    "alignment": "alignment",
    "solver": "solver",
    "recompute": "recompute",
    "loss_block_tokens": "loss_block_tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", required=True, metavar="FILE", help=LENGTHS_HELP)
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(BUILTIN_MODELS)}, or a Hugging Face config.json",
    )
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(BUILTIN_CLUSTERS)}, or a JSON file with its constants",
    )
    parser.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline stages")
    parser.add_argument("--sp", type=int, default=1, metavar="N", help="sequence-parallel ranks")
    parser.add_argument(
        "--context", type=int, metavar="N", help="most tokens of a sequence; default: no limit"
    )
    parser.add_argument(
        "--over-length",
        choices=("error", "truncate", "split", "drop"),
        default="error",
        help="what happens to longer sequences (default error)",
    )
    parser.add_argument(
        "--memory-gib", type=float, metavar="X", help="memory of a device; default: the cluster's"
    )
    parser.add_argument("--zero-stage", type=int, choices=(0, 3), default=3)
    parser.add_argument("--mode", help="planning algorithm (default paper)")
    parser.add_argument("--max-slices", type=_int_or_auto, metavar="N|auto")
    parser.add_argument("--alignment", type=int, metavar="N", help="slice ends are multiples of it")
    parser.add_argument("--solver", help="cpsat (default) or greedy")
    parser.add_argument("--recompute", help="adaptive (default), none or full")
    parser.add_argument("--loss-block-tokens", type=int, metavar="N")
    parser.add_argument("--json", metavar="OUT", help="write the plan there")


def _int_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: the folder does not exist")
    if args.context is not None and args.context < 2:
        raise ConfigError(f"--context {args.context}: a sequence needs at least 2 tokens")
    model, cluster = load_model(args.model), load_cluster(args.cluster)
    layout = make_layout(model, args.pp, args.sp)
    if layout.world_size > cluster.num_devices:
        raise ConfigError(
            f"pp {args.pp} x sp {args.sp} = {layout.world_size} ranks, but cluster {cluster.name} "
            f"has {cluster.num_devices} devices: lower pp or sp"
        )
    lengths = load_lengths(args.lengths, args.context)
    if args.context is not None:
        lengths, report = fit_to_context(lengths, args.context, args.over_length)
        print(report)
    from ds_infinipipe.planner.search import plan_batch
    from ds_infinipipe.viz.tables import plan_summary

    plan = plan_batch(
        lengths.tolist(),
        model=model,
        cluster=cluster,
        layout=layout,
        settings=settings,
        zero_stage=args.zero_stage,
    )
    print(plan_summary(plan))
    if args.json is not None:
        _write(Path(args.json), plan.to_json())
    return 0


def _settings(args: argparse.Namespace) -> PlannerSettings:
    given: dict[str, Any] = {
        field: getattr(args, option)
        for option, field in _SETTINGS.items()
        if getattr(args, option) is not None
    }
    return InfiniPipeConfig.from_section({"planner": given}).planner


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
    print(f"plan written to {path}")
