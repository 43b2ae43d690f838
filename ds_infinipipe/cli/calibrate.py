"""Measure a decoder layer on this device and write the cluster description that predicts it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ds_infinipipe.cli.question import check_folder, write_text

if TYPE_CHECKING:
    from ds_infinipipe.planner.fit import LayerFit

__all__ = ["add_arguments", "run"]

_GOOD_ERROR = 0.05
_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="Hugging Face config.json, or its folder"
    )
    parser.add_argument(
        "--base-cluster",
        default="cpu-local",
        metavar="NAME",
        help="cluster whose peak, memory and links are kept: a built-in name or a JSON file",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="write the cluster there, as JSON"
    )
    parser.add_argument(
        "--budget-s", type=float, default=60.0, metavar="S", help="seconds to measure (default 60)"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU"
    )


def run(args: argparse.Namespace) -> int:
    from ds_infinipipe.errors import ConfigError
    from ds_infinipipe.planner.clusters import load_cluster
    from ds_infinipipe.planner.fit import calibrated_cluster, fit_rows
    from ds_infinipipe.planner.specs import load_model

    check_folder("--output", args.output)
    if not 1.0 <= args.budget_s <= 86400.0:
        raise ConfigError(f"--budget-s {args.budget_s:g}: from 1 second to a day")
    base, model = load_cluster(args.base_cluster), load_model(args.model)

    import torch

    from ds_infinipipe.profiling.layer import profile_layer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    rows = profile_layer(
        args.model, device=device, dtype=getattr(torch, name), budget_s=args.budget_s
    )
    fit = fit_rows(rows)
    print(_table(fit))
    cluster = calibrated_cluster(fit, model, base)
    print(
        f"of {base.name}'s peak: linear {cluster.linear_efficiency:.1%}, attention forward "
        f"{cluster.attention_forward_efficiency:.1%}, backward "
        f"{cluster.attention_backward_efficiency:.1%}; a layer's fixed cost "
        f"{fit.overhead_forward_s * 1e6:.0f} us forward, {fit.overhead_backward_s * 1e6:.0f} us "
        "backward"
    )
    print(
        f"median error {fit.median_error:.1%}, worst {fit.worst_error:.1%} ({fit.worst_row}); "
        f"the links are those of {base.name}, not measured"
    )
    far = fit.rows_beyond(_GOOD_ERROR)
    if far:
        print(f"beyond {_GOOD_ERROR:.0%}: {', '.join(far)}; a quiet machine or more time may help")
    text = json.dumps({**asdict(cluster), "name": f"{base.name}, calibrated"}, indent=1)
    write_text("--output", args.output, text + "\n", "cluster")
    return 0


def _table(fit: LayerFit) -> str:
    half = len(fit.rows)
    lines = ["tokens                    forward    error   backward    error"]
    for i, row in enumerate(fit.rows):
        lines.append(
            f"{row.name:22s} {row.forward_s * 1e3:8.3f} ms  {fit.errors[i]:+6.1%} "
            f"{row.backward_s * 1e3:8.3f} ms  {fit.errors[half + i]:+6.1%}"
        )
    return "\n".join(lines)
