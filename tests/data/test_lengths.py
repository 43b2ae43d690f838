"""Lengths files, the context limit, and the synthetic laws."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_infinipipe.data.lengths import cut_document, fit_to_context, read_lengths, sample_lengths
from ds_infinipipe.errors import ConfigError, DataError


def test_text_npy_and_jsonl_hold_the_same_lengths(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("5\n\n70000\n 12 \n")
    np.save(tmp_path / "l.npy", np.array([5, 70000, 12], dtype=np.int32))
    rows = '5\n{"length": 70000, "id": "x"}\n{"input_ids": [1,1,1,1,1,1,1,1,1,1,1,1]}\n'
    (tmp_path / "l.jsonl").write_text(rows)
    (tmp_path / "l.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    for name in ("l.txt", "l.npy", "l.jsonl", "l.jsonl.gz"):
        assert read_lengths(tmp_path / name).tolist() == [5, 70000, 12], name


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("l.txt", "5\n0\n", r"l\.txt, line 2: length 0 is not usable"),
        ("l.txt", "5\n\n-3\n", r"l\.txt, line 3: length -3 is not usable"),
        ("l.txt", "5\n2.5\n", r"l\.txt, line 2: '2\.5' is not an integer"),
        ("l.txt", "abc", r"line 1: 'abc' is not an integer"),
        ("l.txt", "99999999999999999999", "line 1: length 99999999999999999999 is not usable"),
        ("l.txt", "\n\n", "holds no length"),
        ("l.jsonl", '{"length": 0}\n', "line 1: length 0 is not usable"),
        ("l.jsonl", '{"input_ids": []}\n', "line 1: length 0 is not usable"),
        ("l.jsonl", "5\n{\n", "line 2: not JSON"),
        ("l.jsonl", '{"size": 3}\n', "line 1: .* is neither an integer nor an object"),
        ("l.jsonl", '{"length": true}\n', "line 1: .* is neither an integer nor an object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=expected):
        read_lengths(tmp_path / name)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([3, 0]), "entry 1: length 0 is not usable"),
        (np.array([1.5]), "type float64; one dimension of integers"),
        (np.array([[1, 2]]), r"shape \(1, 2\)"),
        (np.array([], dtype=np.int64), "holds no length"),
    ],
)
def test_a_bad_array_is_refused(tmp_path: Path, array: Any, expected: str) -> None:
    np.save(tmp_path / "l.npy", array)
    with pytest.raises(DataError, match=expected):
        read_lengths(tmp_path / "l.npy")


def test_a_file_that_is_absent_or_no_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.txt does not exist"):
        read_lengths(tmp_path / "absent.txt")
    (tmp_path / "l.npy").write_text("5\n")
    with pytest.raises(DataError, match=r"l\.npy is not a \.npy array"):
        read_lengths(tmp_path / "l.npy")


@pytest.mark.parametrize(
    ("length", "policy", "pieces"),
    [
        (10, "split", [(0, 10)]),
        (11, "split", [(0, 10)]),
        (12, "split", [(0, 10), (10, 2)]),
        (25, "split", [(0, 10), (10, 10), (20, 5)]),
        (25, "truncate", [(0, 10)]),
        (25, "drop", []),
        (25, "error", [(0, 25)]),
    ],
)
def test_documents_are_cut_at_the_context(
    length: int, policy: Any, pieces: list[tuple[int, int]]
) -> None:
    assert cut_document(length, 10, policy) == pieces


def test_fitting_reports_what_was_lost() -> None:
    lengths, report = fit_to_context([4, 21, 10], 10, "split")
    assert lengths.tolist() == [4, 10, 10, 10]
    assert (report.too_long, report.lost_tokens) == (1, 1)
    assert "1 sequences are longer than 10 tokens" in str(report)
    _, clean = fit_to_context([4], 10, "error")
    assert str(clean) == "none of the sequences is longer than 10 tokens"


def test_fitting_refuses_what_the_policy_forbids() -> None:
    with pytest.raises(DataError, match=r"1 of 2 sequences are longer .* number 1 with 21"):
        fit_to_context([4, 21], 10, "error")
    with pytest.raises(DataError, match="no sequence is left"):
        fit_to_context([21], 10, "drop")


@pytest.mark.parametrize("name", ["github-a", "github-b", "commoncrawl", "wikipedia"])
def test_samples_repeat_and_keep_their_bounds(name: str) -> None:
    draw = [sample_lengths(name, 2000, 65536, np.random.default_rng(1)) for _ in range(2)]
    assert (draw[0] == draw[1]).all()
    assert draw[0].min() >= 16
    assert draw[0].max() <= 65536


@pytest.mark.parametrize(
    ("name", "below_8k", "at_64k", "tokens_per_512"),
    [
        ("github-a", 0.915, 0.006, 3.6e6),
        ("github-b", 0.915, 0.006, 2.0e6),
        ("commoncrawl", 0.975, 0.0008, 0.90e6),
    ],
)
def test_samples_meet_the_published_shares(
    name: str, below_8k: float, at_64k: float, tokens_per_512: float
) -> None:
    lengths = sample_lengths(name, 400_000, 65536, np.random.default_rng(0))
    assert np.mean(lengths < 8192) == pytest.approx(below_8k, abs=0.003)
    assert np.mean(lengths >= 65536) == pytest.approx(at_64k, abs=0.001)
    assert 512 * lengths.mean() == pytest.approx(tokens_per_512, rel=0.05)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("github-a", [7883, 8190, 6863, 7224, 4822, 7061]),
        ("github-b", [2132, 2891, 1838, 5671, 3682, 109]),
    ],
)
def test_draws_of_a_law_stay_the_same_from_version_to_version(
    name: str, expected: list[int]
) -> None:
    drawn = sample_lengths(name, 6, 65536, np.random.default_rng(0))
    assert drawn.tolist() == expected


def test_wikipedia_runs_through_the_counted_percentiles() -> None:
    lengths = sample_lengths("wikipedia", 1_000_000, 2**21, np.random.default_rng(0))
    for percentile, counted in ((1, 39), (10, 87), (50, 347), (90, 2112), (99, 10919)):
        assert np.percentile(lengths, percentile) == pytest.approx(counted, rel=0.02)
    tokens_below_8k = lengths[lengths <= 8192].sum() / lengths.sum()
    assert np.mean(lengths <= 8192) == pytest.approx(0.984, abs=0.003)
    assert tokens_below_8k == pytest.approx(0.7254, abs=0.04)
    assert lengths.mean() == pytest.approx(1013.6, rel=0.06)


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(ConfigError, match="'wiki' is unknown; known are github-a"):
        sample_lengths("wiki", 3, 100, np.random.default_rng(0))


def test_a_byte_order_mark_before_lengths_is_no_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", b"5\n6\n"), ("a.jsonl", b'{"length": 5}\n6\n')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text)
        assert read_lengths(tmp_path / name).tolist() == [5, 6]


def test_a_folder_or_no_name_is_no_lengths_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder; give a file"):
        read_lengths(tmp_path)
    with pytest.raises(DataError, match="lengths file '' does not exist"):
        read_lengths("")


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("3\n" + "[" * 100_000)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not JSON of a length"):
        read_lengths(tmp_path / "a.jsonl")
