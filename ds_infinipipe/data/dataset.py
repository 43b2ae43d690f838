"""Training sequences over a corpus: a map-style data set that knows its lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_infinipipe.config.section import DataSettings
from ds_infinipipe.data.corpus import Corpus, CorpusCounts, DocumentSource, read_corpus
from ds_infinipipe.data.files import FileScan
from ds_infinipipe.data.lengths import OverLengthReport, cut_document
from ds_infinipipe.errors import DataError

__all__ = ["CorpusReport", "DocumentDataset", "document_source"]


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """What the corpus was made of, what is left out and why, and what is trained on."""

    scan: FileScan
    counts: CorpusCounts
    over_length: OverLengthReport
    documents: int
    sequences: int
    tokens: int
    longest: int

    def __str__(self) -> str:
        c, s = self.counts, self.scan
        left_out = (
            f"left out: {c.duplicates} duplicates, {c.empty} empty, "
            f"{c.without_label} without a label (at most one token, or all -100), "
            f"{c.beyond_cap} beyond the cap, "
            f"{s.links} symbolic links, {s.hidden_folders} hidden folders, "
            f"{s.unmatched} files with other names"
        )
        return (
            f"{self.sequences} sequences of {self.tokens} tokens (longest {self.longest}) "
            f"from {self.documents} of {c.seen} documents; {left_out}; {self.over_length}; "
            f"{c.repaired} documents with bytes that are not UTF-8 were repaired"
        )


class DocumentDataset:
    """Sequences of at most `context_length` tokens; torch-free, usable as a torch data set.

    `lengths` in tokens, int64 [sequences]. Items are `{"input_ids": int64 [length]}`, read from
    disk when asked for, without bos or eos; those of lines with labels or loss weights also have
    `labels` (-100 where there is none) and `loss_weights`, as long and not shifted. `report` says
    what became of every document.
    """

    def __init__(self, corpus: Corpus, settings: DataSettings) -> None:
        _check_over_length(corpus, settings)
        pieces = [
            (document, start, length)
            for document, tokens in enumerate(corpus.lengths.tolist())
            for start, length in cut_document(tokens, settings.context_length, settings.over_length)
        ]
        if not pieces:
            raise DataError(
                f"all {len(corpus)} documents are longer than context_length "
                f"{settings.context_length} and dropped: raise it or use truncate or split"
            )
        table = np.array(pieces, dtype=np.int64)
        self.corpus = corpus
        self.lengths: NDArray[np.int64] = np.ascontiguousarray(table[:, 2])
        self._documents, self._starts = table[:, 0], table[:, 1]
        self.report = self._make_report(settings)

    @classmethod
    def from_settings(
        cls, settings: DataSettings, vocab_size: int | None = None
    ) -> DocumentDataset:
        """Read the corpus of a configuration; ids outside `vocab_size` raise DataError."""
        return cls(read_corpus(document_source(settings, vocab_size)), settings)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = int(self._starts[index])
        piece = slice(start, start + int(self.lengths[index]))
        tokens = self.corpus.read(int(self._documents[index]))
        item: dict[str, NDArray[Any]] = {"input_ids": tokens.ids[piece]}
        if tokens.labels is not None:
            item["labels"] = tokens.labels[piece]
        if tokens.weights is not None:
            item["loss_weights"] = tokens.weights[piece]
        return item

    def name(self, index: int) -> str:
        """Where a sequence comes from."""
        start = int(self._starts[index])
        source = self.corpus.name(int(self._documents[index]))
        return f"{source}, tokens from {start}" if start else source

    def _make_report(self, settings: DataSettings) -> CorpusReport:
        corpus = self.corpus
        too_long = int(np.count_nonzero(corpus.lengths > settings.context_length))
        tokens = int(self.lengths.sum())
        return CorpusReport(
            scan=corpus.scan,
            counts=corpus.counts,
            over_length=OverLengthReport(
                settings.over_length,
                settings.context_length,
                too_long,
                int(corpus.lengths.sum()) - tokens,
                unit="documents",
            ),
            documents=len(np.unique(self._documents)),
            sequences=len(self),
            tokens=tokens,
            longest=int(self.lengths.max()),
        )


def document_source(settings: DataSettings, vocab_size: int | None = None) -> DocumentSource:
    """The part of the `data` section that says what is read."""
    return DocumentSource(
        paths=(settings.path,) if isinstance(settings.path, str) else settings.path,
        format=settings.format,
        text_field=settings.text_field,
        patterns=None if settings.patterns == "auto" else settings.patterns,
        encoding_errors=settings.encoding_errors,
        max_documents=settings.max_documents,
        seed=settings.seed,
        vocab_size=vocab_size,
    )


def _check_over_length(corpus: Corpus, settings: DataSettings) -> None:
    limit = settings.context_length
    too_long = np.flatnonzero(corpus.lengths > limit)
    if settings.over_length != "error" or not too_long.size:
        return
    worst = int(corpus.lengths.argmax())
    raise DataError(
        f"{too_long.size} of {len(corpus)} documents are longer than context_length {limit}, the "
        f"longest is {corpus.name(worst)} with {corpus.lengths[worst]} tokens: set "
        "infinipipe.data.over_length to truncate, split or drop, or raise context_length"
    )
