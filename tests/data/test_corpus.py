"""The corpus reader: what is read, what is left out and counted, and the over-length policies."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zstandard

from ds_infinipipe.config.section import DataSettings
from ds_infinipipe.data.dataset import DocumentDataset
from ds_infinipipe.data.tokenizer import ByteTokenizer
from ds_infinipipe.errors import DataError


def write(folder: Path, **files: bytes | str) -> str:
    """Files by name, with __ for the dot and ___ for a folder."""
    for name, content in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(folder)


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(
    path: str | tuple[str, ...], vocab_size: int | None = None, **changes: Any
) -> DocumentDataset:
    return DocumentDataset.from_settings(DataSettings(path=path, **changes), vocab_size)


def texts(dataset: DocumentDataset) -> list[str]:
    decode = ByteTokenizer().decode
    return [decode(dataset[i]["input_ids"]) for i in range(len(dataset))]


def test_text_files_are_read_in_path_order_as_bytes(tmp_path: Path) -> None:
    dataset = read(write(tmp_path, b__txt="second", a___z__py="first", c__md="grüße"))
    assert texts(dataset) == ["first", "second", "grüße"]
    assert dataset.lengths.tolist() == [5, 6, 7]
    assert dataset.lengths.dtype == np.int64
    assert dataset[0]["input_ids"].dtype == np.int64
    assert dataset[0]["input_ids"].tolist() == list(b"first")


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    write(tmp_path, a__py="same", b__py="same", empty__txt="", one__txt="x", image__png=b"\x89PNG")
    write(tmp_path, line__jsonl=jsonl({"text": ""}))
    write(tmp_path, _hidden___c__py="hidden folder is named below")
    (tmp_path / "_hidden").rename(tmp_path / ".git")
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "linked").symlink_to(tmp_path / ".git")
    report = read(str(tmp_path)).report
    assert (report.documents, report.sequences, report.tokens) == (1, 1, 4)
    assert report.counts.seen == 5
    assert report.counts.duplicates == 1
    assert report.counts.empty == 2
    assert report.counts.without_label == 1
    assert report.scan.links == 2
    assert report.scan.hidden_folders == 1
    assert report.scan.unmatched == 1
    text = str(report)
    for part in ("1 duplicates", "2 empty", "1 without a label", "2 symbolic links"):
        assert part in text


def test_jsonl_lines_hold_text_or_ids(tmp_path: Path) -> None:
    rows = jsonl({"text": "héllo"}, {"input_ids": [5, 300, 7]}, {"input_ids": [1]}, {"text": ""})
    dataset = read(write(tmp_path, d__jsonl=rows + "\n"))
    assert dataset.lengths.tolist() == [6, 3]
    assert dataset[1]["input_ids"].tolist() == [5, 300, 7]
    assert dataset.report.counts.without_label == 1
    assert dataset.report.counts.empty == 2


def test_labels_come_with_their_ids(tmp_path: Path) -> None:
    rows = jsonl(
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
        {"input_ids": [5, 6], "labels": None},
        {"input_ids": [5, 6], "labels": [5, -100]},
        {"text": "ab", "labels": "a column of its own"},
    )
    dataset = read(write(tmp_path, d__jsonl=rows))
    assert dataset.lengths.tolist() == [3, 2, 2]
    assert dataset[0]["labels"].tolist() == [-100, 6, -100]
    assert dataset[0]["labels"].dtype == np.int64
    assert [list(dataset[i]) for i in (1, 2)] == [["input_ids"], ["input_ids"]]
    # the first token is never predicted, so its label alone trains nothing
    assert dataset.report.counts.without_label == 1


def test_loss_weights_come_with_their_ids_and_all_zero_ones_train_nothing(tmp_path: Path) -> None:
    rows = jsonl(
        {"input_ids": [5, 6, 7], "loss_weights": [0, 1, 0.5]},
        {"input_ids": [5, 6], "loss_weights": [1, 0]},
    )
    dataset = read(write(tmp_path, d__jsonl=rows))
    assert dataset.lengths.tolist() == [3]
    assert dataset[0]["loss_weights"].tolist() == [0.0, 1.0, 0.5]
    assert dataset.report.counts.without_label == 1


@pytest.mark.parametrize(
    ("policy", "labels"), [("truncate", [[0, 1, 2, 3]]), ("split", [[0, 1, 2, 3], [-100, 5]])]
)
def test_labels_are_cut_with_their_document(
    tmp_path: Path, policy: Any, labels: list[list[int]]
) -> None:
    rows = jsonl({"input_ids": [9] * 6, "labels": [0, 1, 2, 3, -100, 5]})
    dataset = read(write(tmp_path, d__jsonl=rows), context_length=4, over_length=policy)
    assert [dataset[i]["labels"].tolist() for i in range(len(dataset))] == labels
    assert all(len(dataset[i]["input_ids"]) == len(labels[i]) for i in range(len(dataset)))


def test_a_byte_order_mark_before_jsonl_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, d__jsonl=b"\xef\xbb\xbf" + jsonl({"text": "abc"}).encode())
    assert texts(read(path)) == ["abc"]


def test_equal_jsonl_lines_are_all_kept(tmp_path: Path) -> None:
    assert len(read(write(tmp_path, d__jsonl=jsonl({"text": "ab"}, {"text": "ab"})))) == 2


@pytest.mark.parametrize(
    ("suffix", "pack"), [("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)]
)
def test_compressed_jsonl_reads_the_same(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    rows = jsonl({"text": "one"}, {"text": "two more"}, {"text": "three"})
    (tmp_path / f"d.jsonl.{suffix}").write_bytes(pack(rows.encode()))
    dataset = read(str(tmp_path))
    assert texts(dataset) == ["one", "two more", "three"]
    assert [texts(dataset)[i] for i in (2, 0)] == ["three", "one"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"d.jsonl.{suffix}").write_bytes(b"not compressed")
    with pytest.raises(DataError, match=rf"d.jsonl.{suffix} cannot be read"):
        read(str(tmp_path))


def test_zstandard_that_is_not_installed_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.compress(b"{}"))
    with (
        mock.patch.dict(sys.modules, {"zstandard": None}),
        pytest.raises(DataError, match=r"ds-infinipipe\[data\]"),
    ):
        read(str(tmp_path))


def test_another_text_field_is_read_when_named(tmp_path: Path) -> None:
    path = write(tmp_path, d__jsonl=jsonl({"content": "abc"}))
    assert texts(read(path, text_field="content")) == ["abc"]
    with pytest.raises(DataError, match=r"d\.jsonl, line 1: neither .* the keys are 'content'"):
        read(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{oops", "line 2: not JSON"),
        ("[1, 2]", "line 2: a JSONL line must be an object"),
        ('{"input_ids": [1, 2.5]}', "line 2: 'input_ids' must be a list of integers"),
        ('{"input_ids": [1, "a"]}', "line 2: 'input_ids' must be a list of integers"),
        ('{"input_ids": [[1], [2, 3]]}', r"must be a list of integers, entry 0 is \[1\]"),
        ('{"input_ids": [1, true]}', "must be a list of integers, entry 1 is True"),
        ('{"input_ids": [1, 9999999999999999999]}', "must be a list of integers, entry 1 is 999"),
        ('{"input_ids": "abc"}', "line 2: 'input_ids' must be a list of integers, it is 'abc'"),
        ('{"text": 5}', "line 2: 'text' is 5, which is no text"),
        ("[" * 100_000, "line 2: not JSON of a document: it is nested too deeply"),
        ('{"input_ids": [1, 2], "labels": [2]}', "2 'input_ids' but 1 'labels': give one label a"),
        ('{"input_ids": [1, 2], "labels": 3}', "'labels' must be a list of integers, it is 3"),
        ('{"input_ids": [1, 2], "labels": [1, -7]}', "line 2: label -7 is negative"),
        ('{"input_ids": [1, 2], "labels": [1, 320]}', "label 320 is outside the model's vocab"),
        (
            '{"input_ids": [1, 2], "loss_weights": [0, -1]}',
            "line 2: 'loss_weights' must be finite numbers of at least 0, entry 1 is -1",
        ),
        (
            '{"input_ids": [1, 2], "loss_weights": [1]}',
            "line 2: 2 'input_ids' but 'loss_weights' is 1",
        ),
        (
            '{"input_ids": [1, 2], "loss_mask": [0, 1]}',
            "line 2: 'loss_mask' is not supported: give 'labels'",
        ),
        ('{"input_ids": [1, -3]}', "line 2: token id -3 is negative: ids start at 0"),
        (
            '{"input_ids": [1, 400]}',
            "line 2: token id 400 is outside the model's vocabulary of 320",
        ),
    ],
)
def test_a_broken_jsonl_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = write(tmp_path, d__jsonl=jsonl({"text": "fine"}) + line + "\n")
    with pytest.raises(DataError, match=expected):
        read(path, vocab_size=320)


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path: Path) -> None:
    dataset = read(write(tmp_path, a__txt=b"ab\xffcd", b__txt="fine"))
    assert texts(dataset) == ["ab\ufffdcd", "fine"]
    assert dataset.lengths[0] == 7
    assert dataset.report.counts.repaired == 1


def test_the_strict_policy_names_file_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path, a__txt="fine", b__txt=b"ab\xffcd")
    with pytest.raises(DataError, match=r"b\.txt: byte 2 \(0xff\) is not UTF-8"):
        read(path, encoding_errors="strict")


def test_a_file_can_be_named_directly_whatever_its_suffix(tmp_path: Path) -> None:
    write(tmp_path, notes__log="some text")
    assert texts(read(str(tmp_path / "notes.log"))) == ["some text"]


def test_several_paths_are_read_one_after_the_other(tmp_path: Path) -> None:
    first, second = write(tmp_path / "b", x__py="bb"), write(tmp_path / "a", x__py="aa")
    assert texts(read((first, second))) == ["bb", "aa"]


def test_patterns_choose_files(tmp_path: Path) -> None:
    path = write(tmp_path, a__py="python", b__dat="data file")
    assert texts(read(path, patterns=("*.dat",))) == ["data file"]


@pytest.mark.parametrize("kind", ["missing", "empty folder", "only empty files", "only pictures"])
def test_an_empty_corpus_says_what_was_found(tmp_path: Path, kind: str) -> None:
    expected = "no document to train on"
    if kind == "only empty files":
        write(tmp_path, a__txt="", b__txt="x")
        expected = r"2 documents \(1 empty, 1 without a label, 0 duplicates\)"
    if kind == "only pictures":
        write(tmp_path, a__png=b"\x89")
        expected = "1 files with other names"
    path = tmp_path / "absent" if kind == "missing" else tmp_path
    with pytest.raises(DataError, match="neither a file nor" if kind == "missing" else expected):
        read(str(path))


def test_the_cap_chooses_the_same_documents_wherever_the_folder_is(tmp_path: Path) -> None:
    files = {f"f{i}__txt": f"document {i}" for i in range(30)}
    one, other = write(tmp_path / "one", **files), write(tmp_path / "other", **files)
    chosen = texts(read(one, max_documents=7, seed=3))
    assert chosen == texts(read(other, max_documents=7, seed=3))
    assert len(chosen) == 7
    assert chosen == sorted(chosen, key=lambda t: f"f{t.split()[1]}.txt")
    assert chosen != texts(read(one, max_documents=7, seed=4))
    assert read(one, max_documents=7).report.counts.beyond_cap == 23


def test_the_cap_counts_documents_that_are_kept(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{f"e{i}__txt": "" for i in range(10)},
        **{f"t{i}__txt": f"t{i}" for i in range(5)},
    )
    assert len(read(str(tmp_path), max_documents=5)) == 5


def test_a_cap_works_on_jsonl_lines_too(tmp_path: Path) -> None:
    rows = jsonl(*({"text": f"line {i:02d}"} for i in range(20)))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    plain = write(tmp_path / "plain", d__jsonl=rows)
    chosen = texts(read(plain, max_documents=4))
    assert len(chosen) == 4
    assert chosen == sorted(chosen)
    assert len(read(str(tmp_path / "d.jsonl.gz"), max_documents=4)) == 4


LONG = "0123456789" * 2 + "x"  # 21 tokens


@pytest.mark.parametrize(
    ("policy", "expected", "lost"),
    [
        ("truncate", ["0123456789", "short"], 11),
        ("split", ["0123456789", "0123456789", "short"], 1),
        ("drop", ["short"], 21),
    ],
)
def test_over_length_policies_do_what_they_say_and_report_it(
    tmp_path: Path, policy: Any, expected: list[str], lost: int
) -> None:
    dataset = read(
        write(tmp_path, a__txt=LONG, b__txt="short"), context_length=10, over_length=policy
    )
    assert texts(dataset) == expected
    report = dataset.report.over_length
    assert (report.policy, report.too_long, report.lost_tokens) == (policy, 1, lost)
    assert f"policy '{policy}': {lost} tokens are left out" in str(dataset.report)
    assert dataset.report.tokens == dataset.lengths.sum() == sum(map(len, expected))


def test_the_error_policy_names_the_longest_document(tmp_path: Path) -> None:
    path = write(tmp_path, a__txt=LONG, b__txt="short")
    with pytest.raises(DataError, match=r"1 of 2 documents are longer .*a\.txt with 21 tokens"):
        read(path, context_length=10)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_line_that_is_too_long_is_named_by_its_number(tmp_path: Path, suffix: str) -> None:
    content = jsonl({"text": "short"}, {"text": "\u00e4"}, {"text": LONG}).encode()
    packed = content if suffix == "jsonl" else gzip.compress(content)
    path = write(tmp_path, **{f"d__{suffix.replace('.', '__')}": packed})
    with pytest.raises(DataError, match=rf"is .*d\.{suffix}, line 3 with 21 tokens"):
        read(path, context_length=10)


def test_dropping_everything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 1 documents are longer than context_length 10"):
        read(write(tmp_path, a__txt=LONG), context_length=10, over_length="drop")


def test_a_file_that_changes_during_the_run_is_noticed(tmp_path: Path) -> None:
    dataset = read(write(tmp_path, a__txt="content"))
    write(tmp_path, a__txt="longer content")
    with pytest.raises(DataError, match="has 14 tokens but had 7"):
        dataset[0]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match="cannot be read any more"):
        dataset[0]


def test_an_index_outside_the_dataset_ends_iteration(tmp_path: Path) -> None:
    dataset = read(write(tmp_path, a__txt="ab", b__txt="cd"))
    assert len(list(dataset)) == 2
    with pytest.raises(IndexError):
        dataset[2]


def test_a_sequence_says_where_it_comes_from(tmp_path: Path) -> None:
    dataset = read(write(tmp_path, a__txt=LONG), context_length=10, over_length="split")
    assert dataset.name(0).endswith("a.txt")
    assert dataset.name(1).endswith("a.txt, tokens from 10")


def test_the_interpreters_own_sources_are_a_corpus() -> None:
    settings = {"max_documents": 20, "over_length": "truncate", "context_length": 2048}
    first, again = read("python-sources", **settings), read("python-sources", **settings)
    assert len(first) == 20
    assert first.lengths.tolist() == again.lengths.tolist()
    assert [first.name(i) for i in range(20)] == [again.name(i) for i in range(20)]
    assert all(first.name(i).endswith(".py") for i in range(20))
    assert "import" in "".join(texts(first))


def test_bytes_survive_the_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve\n\t日本語 🙂"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]])) == text
    assert ids.max() < 256
    with pytest.raises(DataError, match="outside the byte vocabulary"):
        tokenizer.decode(np.array([5000]))
