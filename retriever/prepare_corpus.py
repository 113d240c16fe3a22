"""``python -m retriever.prepare_corpus INPUT … --output corpus.jsonl``: converts a corpus."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from retriever.errors import status_of


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m retriever.prepare_corpus",
        description="Converts title/text JSON Lines, BEIR, DPR and MS MARCO tsv, csv and parquet to the"
        " corpus format of the service; each may be gzipped.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="corpus files, or patterns of files in quotes")
    add("--output", type=Path, required=True, help=".jsonl file to write")
    add("--number_ids", action="store_true", help="give passages their number instead of their id")
    duplicates = "of passages with the same contents keep only the first"
    add("--drop_duplicates", action="store_true", help=duplicates)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    # Not above: --help answers at once, and where nothing is installed.
    from retriever.corpus.prepare import prepare_corpus

    counts = prepare_corpus(
        arguments.inputs, arguments.output, arguments.number_ids, arguments.drop_duplicates
    )
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in sorted(counts.dropped.items()))
    output = f"{counts.written} written to {arguments.output}"
    sys.stdout.write(f"{counts.read} passages read{dropped}, {output}\n")


def main(argv: list[str] | None = None) -> int:
    interrupted = "interrupted; nothing was written: give the same command again"
    return status_of(lambda: run(parse(argv)), interrupted)


if __name__ == "__main__":
    sys.exit(main())
