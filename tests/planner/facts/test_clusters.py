"""Clusters by name and by file, and what links cost, by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from planner_cases import setup_of

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.planner.facts.clusters import (
    BUILTIN_CLUSTERS,
    NODE_TYPES,
    ClusterSpec,
    load_cluster,
)
from ds_infinipipe.planner.facts.links import (
    all2all_s,
    gather_s,
    p2p_token_s,
    replica_sum_s,
    stages_share_a_node,
    sum_shares_links,
)
from ds_infinipipe.planner.facts.models import BUILTIN_MODELS, ModelSpec
from ds_infinipipe.planner.facts.setup import make_layout
from ds_infinipipe.planner.predict.time import CostModel

# 2 nodes of 4; gather 8, all-to-all 4, adapter 2, peer to peer 16 bytes/s
CLUSTER = replace(
    load_cluster("cpu-local"),
    num_nodes=2,
    devices_per_node=4,
    gather_bandwidth=8.0,
    all2all_bandwidth=4.0,
    node_p2p_bandwidth=2.0,
    device_p2p_bandwidth=16.0,
    collective_latency_s=0.0,
)
MODEL = ModelSpec("toy", 4, 8, 16, 8, 8, 1, 32)


def test_the_papers_cluster_has_the_constants_of_the_setting() -> None:
    cluster = BUILTIN_CLUSTERS["a800-80g-4x8"]
    assert load_cluster("a800-80g-4x8") is cluster
    assert (cluster.num_devices, cluster.memory_bytes) == (32, 72 * 2**30)
    rates = cluster.gather_bandwidth, cluster.all2all_bandwidth, cluster.node_p2p_bandwidth
    assert rates == pytest.approx((165e9, 140e9, 42.5e9))


@pytest.mark.parametrize("kind", list(NODE_TYPES))
def test_a_name_gives_any_number_of_nodes_and_devices(kind: str) -> None:
    cluster = load_cluster(f"{kind}-16x4")
    assert (cluster.name, cluster.num_nodes, cluster.devices_per_node) == (f"{kind}-16x4", 16, 4)
    assert cluster.peak_flops == NODE_TYPES[kind].peak_flops


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"base": "h100-80g-2x8", "peak_flops": "fast"}, "peak_flops is 'fast'; it must be a fin"),
        ({"base": "h100-80g-2x8", "num_nodes": 0}, "num_nodes is 0; it must be a whole number abo"),
        ({"base": "h100-80g-2x8", "num_nodes": 1.5}, "num_nodes is 1.5; it must be a whole"),
        ({"base": "h100-80g-2x8", "p2p_latency_s": -1}, "p2p_latency_s is -1; .* of at least 0"),
        ({"base": "h100-80g-2x8", "zero_overlap": 1.5}, "zero_overlap is 1.5; it is a share"),
        ({"base": "v100-2x8"}, "cluster.json: base 'v100-2x8' is not a built-in name"),
        ({"name": "x"}, "cluster.json lacks num_nodes, devices_per_node, memory_bytes, peak_flops"),
        ({"base": "h100-80g-2x8", "peak_flop": 3}, "peak_flop is unknown; did you mean 'peak_fl"),
        ({"base": "h100-80g-2x8", "peak_flops": math.nan}, "peak_flops is nan; it must be a fini"),
        ({"base": "h100-80g-2x8", "gather_bandwidth": math.inf}, "gather_bandwidth is inf; it m"),
        (
            {"base": "h100-80g-2x8", "p2p_latency_s": math.nan},
            "p2p_latency_s is nan; .*, in seconds",
        ),
        ({"base": "h100-80g-2x8", "memory_bytes": 8.5}, "memory_bytes is 8.5; .* in bytes$"),
        ({"bass": "h100-80g-2x8"}, "bass is unknown; did you mean 'base'"),
        ({"base": "h100-80g-2x8", "peak_flops": 10**400}, "peak_flops is 1000"),
        ({"base": "h100-80g-2x8", "memory_bytes": True}, "memory_bytes is True; it must be a wh"),
        ({"base": "h100-80g-2x8", "num_nodes": 10**9}, "num_nodes is 1000000000; at most"),
        ({"base": "h100-80g-2x8", "name": ""}, "name is ''; it must be a text"),
    ],
)
def test_a_bad_cluster_file_is_refused(
    tmp_path: Path, content: dict[str, object], expected: str
) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=expected):
        load_cluster(str(file))


def test_bytes_of_a_cluster_file_may_be_written_as_a_power(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"base": "h100-80g-2x8", "memory_bytes": 8e9}')
    memory_bytes = load_cluster(str(file)).memory_bytes
    assert memory_bytes == 8_000_000_000 and isinstance(memory_bytes, int)


def test_a_cluster_file_fills_from_its_base(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"base": "h100-80g-2x8", "name": "mine", "zero_overlap": 0.5}')
    cluster = load_cluster(str(file))
    assert cluster == replace(load_cluster("h100-80g-2x8"), name="mine", zero_overlap=0.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "cluster '' is neither a file nor a built-in name"),
        ("h100-80g-99999999999x8", "is too large"),
    ],
)
def test_a_name_that_is_no_cluster_is_repeated(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_cluster(name)


def test_a_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no devices"):
        load_cluster("h100-80g-0x8")


def test_peer_to_peer_defaults_to_the_all_to_alls_bandwidth() -> None:
    fields = {f: getattr(CLUSTER, f) for f in ClusterSpec.__slots__ if f != "device_p2p_bandwidth"}
    assert ClusterSpec(**fields).intra_node_p2p_bandwidth == 4.0


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        (1, 0.0),
        (4, 3 / 4 * 64 / 8),
        (8, 1 / 2 * 64 / 2),  # half of it comes through the adapter, the slower way
    ],
)
def test_gathers_go_over_links_inside_a_node_and_adapters_between(
    ranks: int, seconds: float
) -> None:
    assert gather_s(64, ranks, CLUSTER) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        (1, 0.0),
        (4, 3 / 4 * 64 / 4),
        (8, 4 * (1 / 2 * 64) / 2),  # four devices send half of theirs through one adapter
    ],
)
def test_all_to_alls_share_the_adapter_between_nodes(ranks: int, seconds: float) -> None:
    assert all2all_s(64, ranks, CLUSTER) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("pp", "sp", "dp", "shares"),
    [(1, 4, 2, True), (2, 2, 2, True), (4, 1, 2, True), (2, 4, 1, False), (4, 2, 1, False)],
)
def test_stages_share_a_node_when_their_replica_fits(
    pp: int, sp: int, dp: int, shares: bool
) -> None:
    layout = make_layout(MODEL, pp, sp, dp)
    assert stages_share_a_node(layout, CLUSTER) is shares
    token_bytes = 2 * 8
    expected = token_bytes / (sp * 16) if shares else token_bytes / 2
    assert p2p_token_s(setup_of(MODEL, layout, CLUSTER)) == pytest.approx(expected)


def test_sending_inside_a_node_is_what_chunks_are_charged() -> None:
    from ds_infinipipe.planner.plan.chunks import Chunk, Slice

    chunk = Chunk((Slice(0, 0, 6, True),))
    inside = CostModel(setup_of(MODEL, make_layout(MODEL, 2, 2), CLUSTER)).chunk_costs([chunk])
    across = CostModel(setup_of(MODEL, make_layout(MODEL, 2, 4), CLUSTER)).chunk_costs([chunk])
    latency_s = CLUSTER.p2p_latency_s
    assert inside.p2p_s[0] - latency_s == pytest.approx(6 * 16 / 32)
    assert across.p2p_s[0] - latency_s == pytest.approx(6 * 16 / 2)


def test_one_replica_sums_nothing() -> None:
    assert replica_sum_s(1e9, make_layout(MODEL, 2, 4), CLUSTER) == 0.0


def test_replicas_in_a_node_add_up_before_the_adapter() -> None:
    whole = make_layout(MODEL, 1, 4, 2)  # a node each: 4 shards meet in the adapter
    assert replica_sum_s(100, whole, CLUSTER) == pytest.approx(2 * 1 / 2 * 4 * 100 / 2)
    paired = make_layout(MODEL, 1, 2, 4)  # two in a node: over links, then 2 shards a node
    assert replica_sum_s(100, paired, CLUSTER) == pytest.approx(
        2 * 1 / 2 * 100 / 8 + 2 * 1 / 2 * 2 * 100 / 2
    )


@pytest.mark.parametrize(
    ("pp", "sp", "dp", "shares"),
    [(1, 4, 2, False), (1, 2, 4, True), (1, 1, 8, False), (1, 8, 2, True), (2, 2, 2, False)],
)
def test_the_sum_shares_links_with_gathers_of_the_same_kind(
    pp: int, sp: int, dp: int, shares: bool
) -> None:
    assert sum_shares_links(make_layout(MODEL, pp, sp, dp), CLUSTER) is shares


def test_wide_groups_are_dearer_than_those_inside_a_node() -> None:
    model, cluster = BUILTIN_MODELS["llama-7b"], BUILTIN_CLUSTERS["a800-80g-4x8"]
    inside = CostModel(setup_of(model, make_layout(model, 4, 8), cluster)).coefficients
    across = CostModel(setup_of(model, make_layout(model, 2, 16), cluster)).coefficients
    assert across.all2all_s > 5 * inside.all2all_s
    assert across.gather_s > inside.gather_s


def test_the_page_on_clusters_has_every_field_and_an_example_that_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_]+)`", page.split("| field |")[1]))
    assert {field.name for field in fields(ClusterSpec)} <= named
    file = tmp_path / "cluster.json"
    file.write_text(page.split("```json")[1].split("```")[0], encoding="utf-8")
    assert load_cluster(str(file)).num_nodes == 6
