"""``python -m retriever.prepare_corpus INPUT … --output corpus.jsonl``: converts a corpus."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from retriever.errors import status_of


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command; None for `argv` takes those of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m retriever.prepare_corpus",
        description="Converts title/text JSON, BEIR, DPR and MS MARCO tsv, csv, parquet, Arrow and folders"
        " of save_to_disk to the corpus format of the service; text may be packed (gz, bz2, xz, zst, zip).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="corpus files, or patterns of files in quotes")
    add("--output", type=Path, required=True, help=".jsonl file to write")
    add("--number_ids", action="store_true", help="give passages their number instead of their id")
    duplicates = "of passages with the same contents keep only the first"
    add("--drop_duplicates", action="store_true", help=duplicates)
    for name in ("id", "title", "text"):
        add(f"--{name}", default="", metavar="KEY", help=f"key of the {name}, where it is not a usual one")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    """Convert the files, and say on stdout how many passages were read, dropped and written.

    Args:
        arguments: Options as `parse` returns them.

    Raises:
        RetrieverError: As `prepare_corpus`.
    """
    # Imported here: --help must answer at once, and where nothing is installed.
    from retriever.corpus.layouts import Columns
    from retriever.corpus.prepare import prepare_corpus

    counts = prepare_corpus(
        arguments.inputs,
        arguments.output,
        arguments.number_ids,
        arguments.drop_duplicates,
        columns=Columns(arguments.id, arguments.title, arguments.text),
    )
    report = f"{counts.read} passages read"
    for reason, count in sorted(counts.dropped.items()):
        report += f", {count} dropped ({reason})"
    report += f", {counts.written} written to {arguments.output}"
    sys.stdout.write(f"{report}\n")
    if counts.untitled:
        sys.stderr.write(
            f"warning: {counts.untitled} of {counts.written} passages have no title; "
            "if a key holds the title, name it with --title\n"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    interrupted = "interrupted; nothing was written: give the same command again"
    return status_of(lambda: run(parse(argv)), interrupted)


if __name__ == "__main__":
    sys.exit(main())
