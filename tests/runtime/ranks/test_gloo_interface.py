"""Which network interface gloo takes on a cluster whose host names mean the node itself."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from ds_infinipipe.errors import ConfigError
from ds_infinipipe.runtime.ranks import rendezvous

Node = Callable[..., None]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node of two with these interfaces, and its own address on the way to rank 0."""

    def build(interfaces: dict[str, str | None], towards: str | None, name: str) -> None:
        monkeypatch.setattr(socket, "gethostbyname", lambda _: name)
        numbered = list(enumerate(interfaces, start=1))
        monkeypatch.setattr(socket, "if_nameindex", lambda: numbered)
        monkeypatch.setattr(rendezvous, "_address_of", interfaces.__getitem__)
        monkeypatch.setattr(rendezvous, "_address_towards", lambda _: towards)

    for key, value in {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "n0"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    return build


TWO = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7", "down": None}


def _chosen() -> str | None:
    rendezvous.choose_gloo_interface()
    return rendezvous.os.environ["GLOO_SOCKET_IFNAME"] or None


def test_the_interface_that_leads_to_rank_0_is_taken(node: Node) -> None:
    node(TWO, "10.1.0.7", "127.0.1.1")
    assert _chosen() == "ib0"


def test_the_only_one_is_taken_where_rank_0_is_this_node(node: Node) -> None:
    node({"lo": "127.0.0.1", "eth0": "10.0.0.7"}, "127.0.0.1", "127.0.1.1")
    assert _chosen() == "eth0"


def test_a_node_with_several_of_which_none_leads_there_is_told_what_to_set(node: Node) -> None:
    node(TWO, None, "127.0.1.1")
    with pytest.raises(ConfigError, match=r"interfaces \(eth0, ib0\) .* 'n0'.* GLOO_SOCKET_IFNAME"):
        _chosen()


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_WORLD_SIZE": "16"},
        {"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "16"},
        {"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": ""},
    ],
)
def test_on_a_single_node_nothing_is_chosen(
    variables: dict[str, str], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(TWO, None, "127.0.1.1")
    for key, value in variables.items():
        monkeypatch.setenv(key, value) if value else monkeypatch.delenv(key, raising=False)
    assert _chosen() is None


def test_what_the_user_set_and_names_that_other_nodes_can_reach_stay(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(TWO, "10.1.0.7", "10.0.0.7")
    assert _chosen() is None
    node(TWO, "10.1.0.7", "127.0.1.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert _chosen() == "eth0"


def test_addresses_are_those_of_this_machine() -> None:
    assert rendezvous._address_of("lo") == "127.0.0.1"
    assert rendezvous._address_towards("127.0.0.1") == "127.0.0.1"
    assert rendezvous._address_of("no-such-one") is None
