"""Where ranks sit in the nodes, and what their transfers cost over which link.

Ranks are numbered as the runtime numbers them: sequence-parallel ranks next to each other, then
the stages of a replica, then the replicas. So a stage lies inside a node whenever sp divides the
devices of a node, neighbouring stages share a node as long as there is room, and replicas come
last: they only meet once a step.
"""

from __future__ import annotations

from ds_infinipipe.planner.facts.clusters import ClusterSpec
from ds_infinipipe.planner.facts.setup import Layout, Setup

__all__ = [
    "all2all_s",
    "gather_s",
    "p2p_token_s",
    "replica_sum_s",
    "stages_share_a_node",
    "sum_shares_links",
]


def gather_s(num_bytes: float, ranks: int, cluster: ClusterSpec) -> float:
    """Seconds to gather `num_bytes` that `ranks` neighbouring ranks hold shards of.

    Beyond a node it is hierarchical: every node takes the other nodes' shards through its adapter
    once, devices share them over the node's links. The two run at a time, so the slower counts.
    """
    inside, nodes = _spread(ranks, cluster)
    link_s = (inside - 1) / inside * num_bytes / cluster.gather_bandwidth
    return max(link_s, (nodes - 1) / nodes * num_bytes / cluster.node_p2p_bandwidth)


def all2all_s(rank_bytes: float, ranks: int, cluster: ClusterSpec) -> float:
    """Seconds of an all-to-all in which each of `ranks` ranks holds `rank_bytes`.

    Beyond a node the devices share its adapter; both kinds of links run at a time.
    """
    inside, nodes = _spread(ranks, cluster)
    link_s = (inside - 1) / ranks * rank_bytes / cluster.all2all_bandwidth
    leaving = (ranks - inside) / ranks * rank_bytes * inside
    return max(link_s, leaving / cluster.node_p2p_bandwidth if nodes > 1 else 0.0)


def stages_share_a_node(layout: Layout, cluster: ClusterSpec) -> bool:
    """True when a whole replica, and so every hop between its stages, is inside a node."""
    ranks, devices = layout.pp * layout.sp, cluster.devices_per_node
    return ranks <= devices and devices % ranks == 0


def p2p_token_s(setup: Setup) -> float:
    """Seconds per token to hand the hidden states to the next stage.

    Each rank sends its share to its peer: over the node's links when the replica is inside a node,
    else through the adapters of all nodes a stage spans. One figure for all hops: where some of
    them leave the node, the slow one counts for all.
    """
    layout, cluster = setup.layout, setup.cluster
    token_bytes = setup.execution.dtype_bytes * setup.model.hidden_size
    if stages_share_a_node(layout, cluster):
        return token_bytes / (layout.sp * cluster.intra_node_p2p_bandwidth)
    nodes_per_stage = max(1, layout.sp // cluster.devices_per_node)
    return token_bytes / (cluster.node_p2p_bandwidth * nodes_per_stage)


def replica_sum_s(
    rank_bytes: float, layout: Layout, cluster: ClusterSpec, passes: int = 2
) -> float:
    """Seconds to add `rank_bytes` of every rank up over the replicas; 0 with one replica.

    Replicas in one node add up over its links first, then the nodes exchange what is distinct
    through their adapters; a ring's two passes each, or one of a reduce-scatter or a gather.
    """
    if layout.dp == 1 or rank_bytes == 0:
        return 0.0
    inside, outside = _replica_spread(layout, cluster)
    link_s = passes * (inside - 1) / inside * rank_bytes / cluster.gather_bandwidth
    distinct = min(cluster.devices_per_node, layout.pp * layout.sp) * rank_bytes
    nic_s = passes * (outside - 1) / outside * distinct / cluster.node_p2p_bandwidth
    return link_s + nic_s + 2 * cluster.collective_latency_s


def sum_shares_links(layout: Layout, cluster: ClusterSpec) -> bool:
    """True where the replicas' sum goes over links that a stage's own collectives use."""
    inside, outside = _replica_spread(layout, cluster)
    gathers_inside = layout.sp > 1
    gathers_outside = layout.sp > cluster.devices_per_node
    return (inside > 1 and gathers_inside) or (outside > 1 and gathers_outside)


def _replica_spread(layout: Layout, cluster: ClusterSpec) -> tuple[int, int]:
    """(replicas in a node, groups of them in different nodes)."""
    ranks, devices = layout.pp * layout.sp, cluster.devices_per_node
    inside = min(layout.dp, devices // ranks) if stages_share_a_node(layout, cluster) else 1
    return inside, -(-layout.dp // inside)


def _spread(ranks: int, cluster: ClusterSpec) -> tuple[int, int]:
    """(ranks in a node, nodes) of neighbouring ranks."""
    inside = min(ranks, cluster.devices_per_node)
    return inside, -(-ranks // inside)
