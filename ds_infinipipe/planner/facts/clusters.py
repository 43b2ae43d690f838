"""Clusters as plain data: a table of node types, any number of nodes of them, or a JSON file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.json_file import format_close_matches, is_finite_number, read_json_object

__all__ = [
    "BUILTIN_CLUSTERS",
    "CLUSTER_HELP",
    "NODE_TYPES",
    "ClusterSpec",
    "load_cluster",
    "read_named_json",
]

_GIB = 2**30
_MAX_COUNT = 1_000_000
# fields that are whole numbers, and the most that works
_WHOLE = {"num_nodes": _MAX_COUNT, "devices_per_node": _MAX_COUNT, "memory_bytes": 2**60}
# by the end of a field's name
_UNITS = {
    "_bytes": "in bytes",
    "_flops": "in operations a second",
    "_bandwidth": "in bytes a second",
    "_efficiency": "a share of the peak",
    "_s": "in seconds",
}


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Devices and links. Bandwidths are bytes per second and per device unless they say node."""

    name: str
    num_nodes: int
    devices_per_node: int
    memory_bytes: int
    peak_flops: float
    linear_efficiency: float
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    gather_bandwidth: float
    all2all_bandwidth: float
    node_p2p_bandwidth: float
    collective_latency_s: float
    p2p_latency_s: float
    layer_overhead_forward_s: float
    layer_overhead_backward_s: float
    zero_overlap: float = 1.0
    """Share of a parameter gather that hides under compute, 0 to 1."""
    device_p2p_bandwidth: float | None = None
    """From one device to another of its node; None takes the all-to-all's."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def intra_node_p2p_bandwidth(self) -> float:
        return self.device_p2p_bandwidth or self.all2all_bandwidth


def _node(
    memory_gib: int, peak_flops: float, link_bandwidth: float, nic_bandwidth: float
) -> ClusterSpec:
    """One node of eight devices. Bandwidths are the hardware's, one direction.

    The shares of them that programs reach (gather 0.825, all-to-all 0.7, network 0.85), the
    efficiencies of kernels and the latencies are those of the A800 setting, for want of
    measurements on the others.
    """
    return ClusterSpec(
        name="",
        num_nodes=1,
        devices_per_node=8,
        memory_bytes=memory_gib * _GIB,
        peak_flops=peak_flops,
        linear_efficiency=0.58,
        attention_forward_efficiency=0.55,
        attention_backward_efficiency=0.45,
        gather_bandwidth=0.825 * link_bandwidth,
        all2all_bandwidth=0.7 * link_bandwidth,
        node_p2p_bandwidth=0.85 * nic_bandwidth,
        collective_latency_s=15e-6,
        p2p_latency_s=20e-6,
        layer_overhead_forward_s=0.25e-3,
        layer_overhead_backward_s=0.45e-3,
        device_p2p_bandwidth=0.825 * link_bandwidth,
    )


NODE_TYPES: Mapping[str, ClusterSpec] = {
    "a800-80g": _node(72, 312e12, 200e9, 50e9),
    "a100-80g": _node(72, 312e12, 300e9, 200e9),
    "h100-80g": _node(72, 989e12, 450e9, 400e9),
    "h200-141g": _node(126, 989e12, 450e9, 400e9),
}
"""Node types by name; memory is nine tenths of what the driver shows, the rest is the allocator's.

Peaks are the vendor's dense bf16 figures; NVLink is half of the quoted two-way 400, 600, 900 and
900 GB/s. The a800 node has one 400 Gb/s adapter, as the paper's; the others one per device, as
vendors' reference nodes: 8 x 200 Gb/s for a100, 8 x 400 Gb/s for h100 and h200.
"""

_PATTERN = re.compile(rf"({'|'.join(NODE_TYPES)})-(\d+)x(\d+)")

CLUSTER_HELP = f"{'|'.join(NODE_TYPES)}-NODESxDEVICES, cpu-local"


def _named(name: str) -> ClusterSpec | None:
    """Nodes x devices of a node type, such as h100-80g-16x8; None for names of another form."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    if max(len(match[2]), len(match[3])) > len(str(_MAX_COUNT)):
        raise ConfigError(f"cluster {name!r} is too large: write NODESxDEVICES of a real one")
    nodes, devices = int(match[2]), int(match[3])
    if nodes < 1 or devices < 1:
        raise ConfigError(f"cluster {name!r} has no devices: write NODESxDEVICES, both at least 1")
    return replace(NODE_TYPES[match[1]], name=name, num_nodes=nodes, devices_per_node=devices)


# one core per rank, float32, gloo over shared memory
_CPU_LOCAL = ClusterSpec(
    name="cpu-local",
    num_nodes=64,
    devices_per_node=64,
    memory_bytes=4 * _GIB,
    peak_flops=60e9,
    linear_efficiency=0.8,
    attention_forward_efficiency=0.6,
    attention_backward_efficiency=0.6,
    gather_bandwidth=1e9,
    all2all_bandwidth=0.5e9,
    node_p2p_bandwidth=1e9,
    collective_latency_s=0.5e-3,
    p2p_latency_s=1e-3,
    layer_overhead_forward_s=1e-3,
    layer_overhead_backward_s=2e-3,
    zero_overlap=0.0,
)

_A800 = replace(NODE_TYPES["a800-80g"], name="a800-80g-4x8", num_nodes=4)

BUILTIN_CLUSTERS: Mapping[str, ClusterSpec] = {_A800.name: _A800, _CPU_LOCAL.name: _CPU_LOCAL}
"""Ready-made clusters: the paper's, and this machine's cores. `load_cluster` knows more names."""


def _builtin(name: str) -> ClusterSpec | None:
    return BUILTIN_CLUSTERS.get(name) or _named(name)


def load_cluster(name_or_path: str) -> ClusterSpec:
    """A built-in name such as h100-80g-16x8, or a JSON file with ClusterSpec's fields.

    `base` may name a built-in whose fields fill what the file leaves out. Raises ConfigError for
    unknown names and fields, and for figures that are not positive numbers.
    """
    builtin = _builtin(name_or_path)
    if builtin is not None:
        return builtin
    given = dict(read_named_json(name_or_path, "cluster", (CLUSTER_HELP,)))
    base_name = given.pop("base", None)
    base = None if base_name is None else _builtin(str(base_name))
    if base_name is not None and base is None:
        raise ConfigError(
            f"cluster file {name_or_path}: base {base_name!r} is not a built-in name "
            f"({CLUSTER_HELP})"
        )
    _check_names(given, base is not None, name_or_path)
    for name, value in given.items():
        # JSON's 8e9 is a float
        if name in _WHOLE and isinstance(value, float) and value.is_integer():
            given[name] = int(value)
    cluster = ClusterSpec(**given) if base is None else replace(base, **given)
    _check(cluster, name_or_path)
    return cluster


def _check_names(given: Mapping[str, Any], has_base: bool, source: str) -> None:
    known = ["base", *(field.name for field in fields(ClusterSpec))]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"cluster file {source}: {name} is unknown{format_close_matches(name, known)}"
            )
    needed = [f.name for f in fields(ClusterSpec) if f.default is MISSING and f.name not in given]
    if needed and not has_base:
        raise ConfigError(
            f"cluster file {source} lacks {', '.join(needed)}: give them, or a base, the built-in "
            f"cluster they are taken from ({CLUSTER_HELP})"
        )


def _unit(name: str) -> str:
    """The unit of a field as its name ends, behind a comma."""
    return next((f", {unit}" for end, unit in _UNITS.items() if name.endswith(end)), "")


def _check(cluster: ClusterSpec, source: str) -> None:
    if not isinstance(cluster.name, str) or not cluster.name:
        raise ConfigError(f"cluster file {source}: name is {cluster.name!r}; it must be a text")
    may_be_zero = {
        "zero_overlap",
        "collective_latency_s",
        "p2p_latency_s",
        "layer_overhead_forward_s",
        "layer_overhead_backward_s",
    }
    for name in (field.name for field in fields(ClusterSpec) if field.name != "name"):
        value = getattr(cluster, name)
        if name == "device_p2p_bandwidth" and value is None:
            continue
        is_number = is_finite_number(value) and (name not in _WHOLE or isinstance(value, int))
        if not is_number or value < 0 or (value == 0 and name not in may_be_zero):
            kind = "whole number" if name in _WHOLE else "finite number"
            above = "of at least 0" if name in may_be_zero else "above 0"
            raise ConfigError(
                f"cluster file {source}: {name} is {value!r}; it must be a {kind} {above}"
                f"{_unit(name)}"
            )
    for name, most in _WHOLE.items():
        if getattr(cluster, name) > most:
            raise ConfigError(
                f"cluster file {source}: {name} is {getattr(cluster, name)}; at most {most} works"
            )
    if cluster.zero_overlap > 1:
        raise ConfigError(
            f"cluster file {source}: zero_overlap is {cluster.zero_overlap}; it is a share, 0 to 1"
        )


def read_named_json(given: str, what: str, builtins: Iterable[str]) -> Mapping[str, Any]:
    """The JSON object in the file `given`; ConfigError, naming the built-in ones, without one."""
    if not given or not Path(given).is_file():
        raise ConfigError(
            f"{what} {given!r} is neither a file nor a built-in name ({', '.join(builtins)})"
        )
    return read_json_object(given, f"{what} file")
