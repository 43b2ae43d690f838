"""Measure a decoder layer, and links between ranks, and write the cluster that predicts them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ds_infinipipe.cli.parts.inputs import check_folder, write_text
from ds_infinipipe.launcher import launched_ranks, prepare_allocator

if TYPE_CHECKING:
    import torch

    from ds_infinipipe.planner.facts.clusters import ClusterSpec
    from ds_infinipipe.planner.predict.fit import LayerFit, Link, LinkFit
    from ds_infinipipe.profiling.links import NodeShape

__all__ = ["add_arguments", "run"]

_GOOD_ERROR = 0.05
_DTYPES = ("bfloat16", "float16", "float32")
_MOST_NAMED = 8
_LINK_SHARE = 0.25
_PATIENCE_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="Hugging Face config.json, or its folder"
    )
    parser.add_argument(
        "--base-cluster",
        default="cpu-local",
        metavar="NAME",
        help="cluster that keeps what is not measured: a built-in name or a JSON file",
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
    parser.add_argument(
        "--sp",
        type=int,
        metavar="N",
        help="ranks of a group of collectives, under a launcher (default: all of a node)",
    )


def run(args: argparse.Namespace) -> int:
    from ds_infinipipe.errors import ConfigError
    from ds_infinipipe.planner.facts.clusters import load_cluster
    from ds_infinipipe.planner.facts.models import load_model
    from ds_infinipipe.planner.predict.fit import calibrated_cluster

    check_folder("--output", args.output)
    if not 1.0 <= args.budget_s <= 86400.0:
        raise ConfigError(f"--budget-s {args.budget_s:g}: from 1 second to a day")
    base, model = load_cluster(args.base_cluster), load_model(args.model)
    num_ranks = launched_ranks() or 1
    if args.sp is not None and num_ranks == 1:
        raise ConfigError(f"--sp {args.sp}: links need ranks; start calibrate with a launcher")
    prepare_allocator()
    measured = _measure(args, num_ranks)
    if measured is None:
        return 0
    fit, shape, links, memory_bytes = measured
    said = [*_layer_lines(fit), *_link_lines(shape, links)]
    with_links = _changed(base, links, memory_bytes)
    cluster = calibrated_cluster(fit, model, with_links)
    print("\n".join([*said, *_summary(fit, base, cluster, links, memory_bytes)]))
    text = json.dumps({**asdict(cluster), "name": f"{base.name}, calibrated"}, indent=1)
    write_text("--output", args.output, text + "\n", "cluster")
    return 0


def _measure(
    args: argparse.Namespace, num_ranks: int
) -> tuple[LayerFit, NodeShape | None, dict[Link, LinkFit], int | None] | None:
    """What was found; None on all ranks but the first."""
    import torch

    from ds_infinipipe.planner.predict.fit import fit_links, fit_rows
    from ds_infinipipe.profiling.layer import profile_layer
    from ds_infinipipe.profiling.links import profile_links
    from ds_infinipipe.runtime.engine.module import init_distributed
    from ds_infinipipe.runtime.ranks.agree import raise_together

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    shape, links, layer_s = None, {}, args.budget_s
    if num_ranks > 1:
        init_distributed(args.budget_s + _PATIENCE_S)
        links_s = _LINK_SHARE * args.budget_s
        shape, rows = profile_links(device=device, budget_s=links_s, sp=args.sp)
        links, layer_s = fit_links(rows), args.budget_s - links_s
    with raise_together("measuring the layer"):
        fit = fit_rows(
            profile_layer(args.model, device=device, dtype=getattr(torch, dtype), budget_s=layer_s)
        )
    return None if os.environ.get("RANK", "0") != "0" else (fit, shape, links, _memory(device))


def _memory(device: torch.device) -> int | None:
    """Bytes of the device that plans may use, as `clusters.NODE_TYPES` counts them."""
    import torch

    if device.type != "cuda":
        return None
    return int(0.9 * torch.cuda.get_device_properties(device).total_memory)


def _changed(
    base: ClusterSpec, links: dict[Link, LinkFit], memory_bytes: int | None
) -> ClusterSpec:
    from ds_infinipipe.planner.predict.fit import cluster_with_links

    cluster = cluster_with_links(links, base)
    return cluster if memory_bytes is None else replace(cluster, memory_bytes=memory_bytes)


def _layer_lines(fit: LayerFit) -> Iterator[str]:
    half = len(fit.rows)
    yield "tokens                         forward    error   backward    error"
    for i, row in enumerate(fit.rows):
        yield (
            f"{row.name:27s} {row.forward_s * 1e3:8.3f} ms  {fit.errors[i]:+6.1%} "
            f"{row.backward_s * 1e3:8.3f} ms  {fit.errors[half + i]:+6.1%}"
        )


def _link_lines(shape: NodeShape | None, links: dict[Link, LinkFit]) -> Iterator[str]:
    if shape is None:
        return
    yield f"nodes: {shape.num_nodes}, ranks in each: {shape.ranks_per_node}"
    for link, found in links.items():
        yield (
            f"{link.value:27s} {found.bytes_per_s / 1e9:8.3f} GB/s after "
            f"{found.latency_s * 1e6:.0f} us, worst error {found.worst_error:.0%}"
        )


def _summary(
    fit: LayerFit,
    base: ClusterSpec,
    cluster: ClusterSpec,
    links: dict[Link, LinkFit],
    memory_bytes: int | None,
) -> Iterator[str]:
    yield (
        f"of {base.name}'s peak: linear {cluster.linear_efficiency:.1%}, attention forward "
        f"{cluster.attention_forward_efficiency:.1%}, backward "
        f"{cluster.attention_backward_efficiency:.1%}; a layer's fixed cost "
        f"{fit.overhead_forward_s * 1e6:.0f} us forward, {fit.overhead_backward_s * 1e6:.0f} us "
        "backward"
    )
    yield f"median error {fit.median_error:.1%}, worst {fit.worst_error:.1%} ({fit.worst_row})"
    far = fit.rows_beyond(_GOOD_ERROR)
    if far:
        more = f" and {len(far) - _MOST_NAMED} more" if len(far) > _MOST_NAMED else ""
        yield (
            f"beyond {_GOOD_ERROR:.0%}: {', '.join(far[:_MOST_NAMED])}{more}; a quiet machine or "
            "more time may help"
        )
    if memory_bytes is not None:
        yield f"memory {memory_bytes / 2**30:.1f} GiB, nine tenths of the device's"
    yield f"as in {base.name}, not measured: {', '.join(_kept(links, memory_bytes))}"


def _kept(links: dict[Link, LinkFit], memory_bytes: int | None) -> Iterator[str]:
    """Fields of the cluster that are the base's."""
    from ds_infinipipe.planner.predict.fit import Link

    yield from ("num_nodes", "devices_per_node", "peak_flops", "zero_overlap")
    if memory_bytes is None:
        yield "memory_bytes"
    if Link.GATHER not in links:
        yield from ("gather_bandwidth", "all2all_bandwidth", "collective_latency_s")
    if Link.HOP not in links:
        yield "device_p2p_bandwidth"
    if Link.NODE_HOP not in links:
        yield "node_p2p_bandwidth"
    if Link.HOP not in links and Link.NODE_HOP not in links:
        yield "p2p_latency_s"
