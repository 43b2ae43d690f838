"""Count the documents of a corpus: percentiles of lengths, and which lengths hold the tokens."""

from __future__ import annotations

import argparse

from ds_infinipipe.cli.parts.inputs import check_folder, write_text

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help='text, code or JSONL files, folders of them, or "python-sources"',
    )
    parser.add_argument(
        "--tokenizer", choices=("bytes",), default="bytes", help="bytes (default): UTF-8 bytes"
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="text of a JSONL line (default text)"
    )
    parser.add_argument(
        "--max-documents", type=int, metavar="N", help="a fair choice of N documents"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write one length a line")


def run(args: argparse.Namespace) -> int:
    from ds_infinipipe.data.corpus import DocumentSource, read_corpus
    from ds_infinipipe.data.length_table import length_table
    from ds_infinipipe.errors import ConfigError

    check_folder("--output", args.output)
    if args.max_documents is not None and args.max_documents < 1:
        raise ConfigError(f"--max-documents {args.max_documents}: at least 1 is needed")
    source = DocumentSource(
        tuple(args.paths), text_field=args.text_field, max_documents=args.max_documents
    )
    corpus = read_corpus(source)
    print(length_table(corpus.lengths))
    left_out = {
        "empty": corpus.counts.empty,
        "without a label": corpus.counts.without_label,
        "duplicates": corpus.counts.duplicates,
        "beyond --max-documents": corpus.counts.beyond_cap,
        "files of other types": corpus.scan.unmatched,
    }
    skipped = ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
    if skipped:
        print(f"left out   {skipped}")
    if args.output is not None:
        text = "".join(f"{length}\n" for length in corpus.lengths.tolist())
        write_text("--output", args.output, text, "lengths")
    return 0
