"""Documents of text, code and JSONL files, indexed without keeping their content.

A document is a whole text file or one JSONL line. Text files with equal content count once;
JSONL lines are taken as they are, since a data set may repeat lines on purpose. Only the position
and the number of tokens of a document are kept; its tokens are read again when asked for. The
lines of compressed files cannot be reached singly: such a file stays in memory once it is used.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.data.decode import EncodingPolicy, Tokens, tokenize_line, tokenize_text
from ds_infinipipe.data.files import JSONL_PATTERNS, TEXT_PATTERNS, FileScan, scan_files
from ds_infinipipe.data.packed import JSONL_SUFFIXES, is_packed, open_bytes
from ds_infinipipe.errors import DataError

__all__ = ["Corpus", "CorpusCounts", "DocumentSource", "read_corpus"]

_WHOLE_FILE = -1
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class DocumentSource:
    """What to read and how; the configuration's `data` section without what follows reading."""

    paths: tuple[str, ...]
    format: Literal["auto", "text", "jsonl"] = "auto"
    text_field: str = "text"
    patterns: tuple[str, ...] | None = None
    encoding_errors: EncodingPolicy = "replace"
    max_documents: int | None = None
    seed: int = 0
    vocab_size: int | None = None

    def is_jsonl(self, path: str) -> bool:
        if self.format == "auto":
            return path.endswith(JSONL_SUFFIXES)
        return self.format == "jsonl"

    def file_patterns(self) -> tuple[str, ...]:
        if self.patterns is not None:
            return self.patterns
        text = () if self.format == "jsonl" else TEXT_PATTERNS
        return text + (() if self.format == "text" else JSONL_PATTERNS)

    def tokenize(self, content: bytes, is_line: bool) -> Tokens:
        """The tokens of a document; ValueError if it is broken."""
        if is_line:
            return tokenize_line(content, self.text_field, self.encoding_errors, self.vocab_size)
        return tokenize_text(content, self.encoding_errors, self.vocab_size)


@dataclass(slots=True)
class CorpusCounts:
    """Documents that were read, and why some of them are left out."""

    seen: int = 0
    duplicates: int = 0
    empty: int = 0
    without_label: int = 0
    beyond_cap: int = 0
    repaired: int = 0
    """Documents that stay in, with bytes that are not UTF-8 replaced."""


class _Position(NamedTuple):
    """A whole file (offset -1), or a line by its byte offset (compressed: its number from 0)."""

    file: int
    offset: int
    line: int
    content: bytes | None


@dataclass(slots=True)
class Corpus:
    """The documents that are left; `lengths` in tokens, int64 [documents]."""

    source: DocumentSource
    scan: FileScan
    files: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    counts: CorpusCounts
    _unpacked: dict[str, list[bytes]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.lengths)

    def name(self, document: int) -> str:
        """The file of a document, and for JSONL its line: for error messages."""
        path, offset = self.scan.files[int(self.files[document])], int(self.offsets[document])
        if offset == _WHOLE_FILE:
            return path
        try:
            return f"{path}, line {_line_number(path, offset)}"
        except OSError:  # the file is gone
            return f"{path} at {'line' if is_packed(path) else 'byte'} offset {offset}"

    def read(self, document: int) -> Tokens:
        """A document, `lengths[document]` tokens; DataError if the file changed since."""
        path, offset = self.scan.files[self.files[document]], int(self.offsets[document])
        try:
            content = _read(path, offset, self._unpacked)
            tokens = self.source.tokenize(content, offset != _WHOLE_FILE)
        except (OSError, EOFError, IndexError, ValueError) as error:
            raise DataError(f"{self.name(document)} cannot be read any more: {error}") from error
        if len(tokens.ids) != self.lengths[document]:
            raise DataError(
                f"{self.name(document)} has {len(tokens.ids)} tokens but had "
                f"{self.lengths[document]} when the run started: the corpus must not change "
                "during training"
            )
        return tokens


def read_corpus(source: DocumentSource) -> Corpus:
    """Find, select and measure the documents; their order is that of paths, then of lines.

    Raises DataError for missing paths, broken lines, bytes that are not UTF-8 under the strict
    policy, and when no document is left, saying what was found instead.
    """
    scan = scan_files(source.paths, source.file_patterns())
    gauge = _Gauge(source, scan)
    columns = array("q"), array("q"), array("q")
    for position in _select_order(scan, source):
        if source.max_documents is not None and len(columns[0]) >= source.max_documents:
            gauge.counts.beyond_cap += 1
        elif length := gauge.measure(position):
            for column, value in zip(
                columns, (position.file, position.offset, length), strict=True
            ):
                column.append(value)
    if not columns[0]:
        raise DataError(_describe_nothing(source, scan, gauge.counts))
    files, offsets, lengths = (np.array(column, dtype=np.int64) for column in columns)
    order = np.lexsort((offsets, files))
    return Corpus(source, scan, files[order], offsets[order], lengths[order], gauge.counts)


def _select_order(scan: FileScan, source: DocumentSource) -> Iterable[_Position]:
    """Under a cap, by hash of seed and name: a fair choice that can be repeated anywhere."""
    if source.max_documents is None:
        return _positions(scan, source, with_content=True)

    def key(position: _Position) -> bytes:
        text = f"{source.seed}:{scan.names[position.file]}:{position.line}"
        return hashlib.sha1(text.encode("utf-8", "surrogateescape")).digest()

    return sorted(_positions(scan, source, with_content=False), key=key)


def _positions(scan: FileScan, source: DocumentSource, with_content: bool) -> Iterator[_Position]:
    for file, path in enumerate(scan.files):
        if not source.is_jsonl(path):
            yield _Position(file, _WHOLE_FILE, 0, None)
            continue
        packed, offset = is_packed(path), 0
        try:
            with open_bytes(path) as stream:
                for number, line in enumerate(stream):
                    content = line if with_content else None
                    yield _Position(file, number if packed else offset, number + 1, content)
                    offset += len(line)
        except (OSError, EOFError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


@dataclass(slots=True)
class _Gauge:
    """Measures documents one by one and counts those that are left out."""

    source: DocumentSource
    scan: FileScan
    counts: CorpusCounts = field(default_factory=CorpusCounts)
    _digests: set[bytes] = field(default_factory=set)
    _unpacked: dict[str, list[bytes]] = field(default_factory=dict)

    def measure(self, position: _Position) -> int:
        """Tokens of a document, or 0 if it is left out."""
        path, is_line = self.scan.files[position.file], position.offset != _WHOLE_FILE
        self.counts.seen += 1
        content = position.content
        try:
            if content is None:
                content = _read(path, position.offset, self._unpacked)
            if not (content.strip() if is_line else content):
                self.counts.empty += 1
                return 0
            if not is_line and not self._is_new(content):
                self.counts.duplicates += 1
                return 0
            tokens = self.source.tokenize(content, is_line)
        except (OSError, EOFError, ValueError) as error:
            where = f"{path}, line {position.line}" if is_line else path
            raise DataError(f"{where}: {error}") from error
        if not len(tokens.ids):
            self.counts.empty += 1
            return 0
        if not tokens.has_label:
            self.counts.without_label += 1
            return 0
        self.counts.repaired += tokens.is_repaired
        return len(tokens.ids)

    def _is_new(self, content: bytes) -> bool:
        before = len(self._digests)
        self._digests.add(hashlib.sha1(content).digest())
        return len(self._digests) > before


def _read(path: str, offset: int, unpacked: dict[str, list[bytes]]) -> bytes:
    """The bytes of one document; a compressed JSONL file is unpacked once and kept."""
    if offset != _WHOLE_FILE and is_packed(path):
        if path not in unpacked:
            with open_bytes(path) as stream:
                unpacked[path] = stream.readlines()
        return unpacked[path][offset]
    with open_bytes(path) as stream:
        if offset == _WHOLE_FILE:
            return stream.read()
        stream.seek(offset)
        return stream.readline()


def _line_number(path: str, offset: int) -> int:
    """From 1; reads the file up to there, as only byte offsets are kept."""
    if is_packed(path):
        return offset + 1
    number, left = 1, offset
    with open_bytes(path) as stream:
        while left and (block := stream.read(min(left, _BLOCK_BYTES))):
            number += block.count(b"\n")
            left -= len(block)
    return number


def _describe_nothing(source: DocumentSource, scan: FileScan, counts: CorpusCounts) -> str:
    found = (
        f"{counts.seen} documents ({counts.empty} empty, {counts.without_label} without a label, "
        f"{counts.duplicates} duplicates), {scan.unmatched} files with other names, "
        f"{scan.links} symbolic links, {scan.hidden_folders} hidden folders"
    )
    return (
        f"no document to train on in {', '.join(source.paths)}: found {found}; "
        f"the patterns were {', '.join(source.file_patterns())}"
    )
