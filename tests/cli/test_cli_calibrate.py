"""`infinipipe calibrate`: measures this machine, and plan takes what it wrote."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from ds_infinipipe.cli import main
from ds_infinipipe.errors import ConfigError
from ds_infinipipe.ops.kv_arena import SequenceArena
from ds_infinipipe.planner.facts.clusters import load_cluster
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.predict.fit import Link, fit_links
from ds_infinipipe.profiling import layer, links
from ds_infinipipe.profiling.layer import _Bench, profile_layer
from ds_infinipipe.profiling.links import NodeShape, profile_links

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 65536,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def _measure_little(patch: pytest.MonkeyPatch) -> None:
    """Fewest rounds of the fewest sizes of a layer, however much time is given."""
    patch.setattr(layer, "_MOST_ROUNDS", layer._LEAST_ROUNDS)
    patch.setattr(layer, "_MOST_TOKENS", 8 * layer._LEAST_TOKENS)


def test_what_is_written_is_a_cluster_that_plans(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _measure_little(monkeypatch)
    output = str(tmp_path / "cluster.json")
    assert main(["calibrate", "--model", model, "--budget-s", "20", "-o", output]) == 0
    said = capsys.readouterr().out
    assert "512+512+512+512" in said or "128+128+128+128" in said
    assert "64 over 448" in said and "median error" in said and "not measured" in said
    cluster = load_cluster(output)
    assert cluster.name == "cpu-local, calibrated" and cluster.linear_efficiency > 0
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n900\n", encoding="utf-8")
    plan = ["plan", "--lengths", str(lengths), "--model", model, "--cluster", output, "--pp", "2"]
    assert main(plan) == 0


def _calibrate(rank: int, model: str, output: str) -> tuple[int, str]:
    _measure_little(pytest.MonkeyPatch())
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(["calibrate", "--model", model, "--budget-s", "6", "-o", output])
    return code, said.getvalue()


@pytest.mark.ranks
def test_ranks_measure_their_links_together_and_the_first_writes(
    model: str, tmp_path: Path
) -> None:
    output = str(tmp_path / "cluster.json")
    (code, said), (other_code, other_said) = run_ranks(_calibrate, 2, model, output, timeout=120.0)
    assert (code, other_code, other_said) == (0, 0, "")
    for link in (Link.HOP, Link.GATHER, Link.REDUCE, Link.ALL_TO_ALL):
        assert re.search(rf"{link.value} +[0-9.]+ GB/s after \d+ us", said), said
    kept = said.splitlines()[-2]
    assert "node_p2p_bandwidth" in kept and "memory_bytes" in kept and "gather" not in kept
    base, cluster = load_cluster("cpu-local"), load_cluster(output)
    for field in ("gather_bandwidth", "all2all_bandwidth", "device_p2p_bandwidth"):
        assert getattr(cluster, field) != getattr(base, field)
    assert cluster.node_p2p_bandwidth == base.node_p2p_bandwidth


def _links(rank: int, hosts: list[str], sp: int | None) -> Any:
    links._SURE_BYTES = 4 * 2**20  # the least of what `calibrate` measures takes four ranks long
    return profile_links(device=torch.device("cpu"), budget_s=0.5, sp=sp, host=hosts[rank])


@pytest.mark.ranks
def test_links_between_nodes_are_told_from_those_inside_by_the_hosts_names() -> None:
    hosts = ["one", "one", "two", "two"]
    results = run_ranks(_links, 4, hosts, None, timeout=120.0)
    assert results[1:] == results[:1] * 3  # all ranks agree on every time
    shape, rows = results[0]
    assert shape == NodeShape(2, 2)
    assert {row.link for row in rows} == set(Link)
    for link in Link:
        sizes = [row.num_bytes for row in rows if row.link is link]
        assert len(sizes) >= 4 and sizes == sorted(sizes)
    # both ranks of a node send at once, and half of what two gather is another's
    first = {row.link: row.num_bytes for row in reversed(rows)}
    assert (first[Link.HOP], first[Link.NODE_HOP], first[Link.GATHER]) == (4096, 8192, 2048)
    assert set(fit_links(rows)) == set(Link)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("hosts", "sp", "message"),
    [
        (["a", "a", "b"], None, "the ranks are 2 on a, 1 on b: start equally many"),
        (["a", "b", "a", "b"], None, "numbered node by node"),
        (["a", "a", "b", "b"], 4, "--sp 4: it has to divide the 2 ranks of a node"),
    ],
)
def test_ranks_that_lie_unevenly_are_refused(
    hosts: list[str], sp: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_ranks(_links, len(hosts), hosts, sp, timeout=60.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--budget-s", "0"], "--budget-s 0: from 1 second"),
        (["--sp", "2"], "--sp 2: links need ranks"),
        (["--base-cluster", "nowhere"], "cluster 'nowhere' is neither a file nor a built-in"),
        (["-o", "/nowhere/cluster.json"], "the folder does not exist"),
        (["--model", "nothing.json"], "neither a file nor a built-in name"),
    ],
)
def test_bad_input_is_named_before_anything_is_measured(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: list[str],
    message: str,
) -> None:
    given = ["calibrate", "--model", model, "-o", str(tmp_path / "c.json"), *changed]
    assert main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("budget_s", [1.2, 6.0])
def test_measuring_a_layer_takes_about_the_time_given(
    monkeypatch: pytest.MonkeyPatch, budget_s: float
) -> None:
    spent_s = 0.0

    def measure(bench: _Bench, chunk: Chunk) -> tuple[float, float]:
        """A millisecond for 64 tokens, and so on."""
        nonlocal spent_s
        taken_s = chunk.padded_tokens / 64e3
        spent_s += taken_s
        return taken_s / 3, taken_s * 2 / 3

    monkeypatch.setattr(_Bench, "measure", measure)
    monkeypatch.setattr(layer, "_seconds_of", lambda device: lambda: spent_s)
    arguments: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    rows = profile_layer(CONFIG, **arguments, budget_s=budget_s)
    assert 0.7 * budget_s < spent_s <= budget_s
    times = [row.backward_s for row in rows]
    assert max(times) >= 7.9 * min(times)  # 64 to 512 tokens at least
    with pytest.raises(ConfigError, match=r"0\.1 s are not enough to measure a layer at 512 tok"):
        profile_layer(CONFIG, **arguments, budget_s=0.1)


def test_the_backward_of_an_earlier_slice_adds_to_what_later_ones_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added: list[int] = []
    add = SequenceArena._add

    def counted(total: torch.Tensor, grad: torch.Tensor, start: int) -> torch.Tensor:
        added.append(len(grad))
        return add(total, grad, start)

    monkeypatch.setattr(SequenceArena, "_add", staticmethod(counted))
    bench = _Bench.build(CONFIG, torch.device("cpu"), torch.float32, "auto", "auto")
    assert min(bench.measure(Chunk((Slice(0, 32, 16, False),)))) > 0
    assert added == [48, 48]  # keys and values of all rows up to the slice's end
    bench.measure(Chunk((Slice(0, 32, 16, True),)))
    assert added == [48, 48]
