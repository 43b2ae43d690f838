"""What `plan` and `compare` have in common: a batch, a model, a cluster, degrees and settings."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_infinipipe.cli.parts.sources import LENGTHS_HELP, load_lengths
from ds_infinipipe.config.section import InfiniPipeConfig
from ds_infinipipe.data.lengths import fit_to_context
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.clusters import CLUSTER_HELP, ClusterSpec, load_cluster
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS, ModelSpec, load_model
from ds_infinipipe.planner.facts.settings import PlannerSection, PlannerSettings
from ds_infinipipe.planner.facts.setup import Execution, Layout, Setup, make_layout

__all__ = ["Question", "add_question_arguments", "check_folder", "read_question", "write_text"]

# option -> field of PlannerSection
_SETTINGS = {
    "mode": "mode",
    "memory_gib": "memory_limit_gib",
    "max_slices": "max_slices",
    "alignment": "alignment",
    "solver": "solver",
    "time_limit": "solver_time_limit_s",
    "deadline": "deadline_s",
    "recompute": "recompute",
    "lean_solver": "lean_solver",
    "loss_block_tokens": "loss_block_tokens",
    "gather": "gather",
}


@dataclass(frozen=True)
class Question:
    """A batch and what to run it with. With `tries_layouts` any layout may take the place of the
    one in `setup`, which only tells that the model's heads can be shared at all.
    """

    lengths: tuple[int, ...]
    setup: Setup
    settings: PlannerSettings
    tries_layouts: bool


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a batch, a model, a cluster, a layout, and of how to plan."""
    parser.add_argument("--lengths", required=True, metavar="FILE", help=LENGTHS_HELP)
    _add_model_arguments(parser)
    _add_layout_arguments(parser)
    parser.add_argument(
        "--context", type=int, metavar="N", help="most tokens of a sequence; default: no limit"
    )
    parser.add_argument(
        "--over-length",
        choices=("error", "truncate", "split", "drop"),
        default="error",
        help="what happens to longer sequences (default error)",
    )
    _add_planner_arguments(parser)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(BUILTIN_MODELS)}, or a Hugging Face config.json",
    )
    parser.add_argument(
        "--kernels",
        choices=("fused", "plain"),
        help="layers whose saved activations are counted: with fused norm and SwiGLU, or plain "
        "Hugging Face ones, as training here has (default: fused for the built-in models, plain "
        "for a config.json)",
    )
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME|FILE",
        help=f"{CLUSTER_HELP}, or a JSON file with its constants",
    )


def _add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layout",
        choices=("fixed", "auto"),
        default="fixed",
        help="auto tries all pp x sp x dp of the cluster's devices",
    )
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline stages")
    parser.add_argument("--sp", type=int, metavar="N", help="sequence-parallel ranks")
    parser.add_argument("--dp", type=int, metavar="N", help="data-parallel replicas (default 1)")
    parser.add_argument(
        "--layers",
        type=_layers,
        default="even",
        metavar="even|auto|N,N,...",
        help="decoder layers of each stage; auto: fewer on the last where that is faster, as with "
        "large vocabularies (default even)",
    )


def _add_planner_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-gib", type=float, metavar="X", help="memory of a device; default: the cluster's"
    )
    parser.add_argument("--zero-stage", type=int, choices=(0, 3), default=3)
    default = PlannerSettings().mode
    parser.add_argument("--mode", help=f"planning algorithm (default {default})")
    parser.add_argument("--max-slices", type=_int_or_auto, metavar="N|auto")
    parser.add_argument("--alignment", type=int, metavar="N", help="slice ends are multiples of it")
    parser.add_argument("--solver", help="cpsat (default; lean mode: LPs) or greedy")
    parser.add_argument("--lean-solver", help="LPs of lean mode: auto (default), stage or makespan")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds of a solve")
    parser.add_argument(
        "--deadline",
        type=_float_or_auto,
        metavar="S|auto",
        help="seconds of planning in all (default: no limit); auto: the work of one step",
    )
    parser.add_argument("--recompute", help="adaptive (default), none or full")
    parser.add_argument("--loss-block-tokens", type=int, metavar="N")
    parser.add_argument("--gather", choices=("auto", "chunk", "step"))


def _int_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _layers(text: str) -> str | tuple[int, ...]:
    return text if text in ("even", "auto") else tuple(int(part) for part in text.split(","))


def _float_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


def read_question(args: argparse.Namespace, *, has_default_layout: bool = False) -> Question:
    """Check the options and load what they name; says on stdout what the context limit did.

    Raises ConfigError or DataError for anything that cannot be. With `has_default_layout` a stage
    per node is taken where no degrees are given, as in the paper.
    """
    section = _section(args)
    if args.context is not None and args.context < 2:
        raise ConfigError(f"--context {args.context}: a sequence needs at least 2 tokens")
    model, cluster = load_model(args.model), load_cluster(args.cluster)
    kernels = args.kernels or ("fused" if args.model in BUILTIN_MODELS else "plain")
    execution = Execution(zero_stage=args.zero_stage, fused_kernels=kernels == "fused")
    layout = _layout(args, model, cluster, has_default_layout)
    setup = section.setup(model, cluster, layout, execution)
    lengths = load_lengths(args.lengths, args.context)
    if args.context is not None:
        lengths, report = fit_to_context(lengths, args.context, args.over_length)
        print(report)
    batch = tuple(int(length) for length in lengths.tolist())
    setup = _with_layers(args, batch, setup, section.settings)
    return Question(batch, setup, section.settings, args.layout == "auto")


def _section(args: argparse.Namespace) -> PlannerSection:
    given: dict[str, Any] = {
        field: getattr(args, option)
        for option, field in _SETTINGS.items()
        if getattr(args, option) is not None
    }
    return InfiniPipeConfig.from_section({"planner": given}).planner


def _layout(
    args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec, has_default: bool
) -> Layout:
    given = {name: getattr(args, name) for name in ("pp", "sp", "dp")}
    if args.layout == "auto":
        named = [f"--{name}" for name, value in given.items() if value is not None]
        if named:
            raise ConfigError(f"--layout auto chooses the degrees: leave out {' and '.join(named)}")
        return make_layout(model, 1, 1)
    if has_default and all(value is None for value in given.values()):
        return _stage_per_node(model, cluster)
    if args.pp is None:
        raise ConfigError("give the pipeline stages with --pp N, or --layout auto")
    degrees = [1 if value is None else value for value in given.values()]
    layout = make_layout(model, *degrees)
    if layout.world_size > cluster.num_devices:
        product = f"pp {layout.pp} x sp {layout.sp}" + (f" x dp {layout.dp}" if args.dp else "")
        raise ConfigError(
            f"{product} = {layout.world_size} ranks, but cluster {cluster.name} has "
            f"{cluster.num_devices} devices: lower pp or sp"
        )
    return layout


def _with_layers(
    args: argparse.Namespace,
    lengths: tuple[int, ...],
    setup: Setup,
    settings: PlannerSettings,
) -> Setup:
    if args.layers == "even":
        return setup
    if args.layout == "auto":
        raise ConfigError("--layout auto tries even layers: leave out --layers")
    from ds_infinipipe.planner.search.what_if.stage_layers import choose_layers, with_stage_layers

    if args.layers == "auto":
        return replace(setup, layout=choose_layers(lengths, setup, settings))
    return replace(setup, layout=with_stage_layers(setup.layout, setup.model, args.layers))


def _stage_per_node(model: ModelSpec, cluster: ClusterSpec) -> Layout:
    """Ulysses inside a node and stages across (V-A), replicas of it where layers run out."""
    pp = math.gcd(cluster.num_nodes, 2 ** model.num_layers.bit_length())
    while pp > model.num_layers:
        pp //= 2
    return make_layout(model, pp, cluster.devices_per_node, cluster.num_nodes // pp)


def check_folder(option: str, path: str | None) -> None:
    """ConfigError where the file's folder does not exist: found before the work, not after."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder does not exist")


def write_text(option: str, path: str | Path, text: str, what: str) -> None:
    """Write a result and say so; ConfigError where that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from error
    print(f"{what} written to {path}")
