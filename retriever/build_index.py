"""``python -m retriever.build_index --corpus_path FILE --index_path FOLDER``; started again, it continues."""

from __future__ import annotations

import argparse
import sys

from retriever.errors import require, status_of
from retriever.options import BUILT, INSTALL, add_build, add_source, given_build


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The fields of `indexing.options.BuildOptions`, which checks them, and where corpus and index are."""
    parser = argparse.ArgumentParser(
        prog="python -m retriever.build_index",
        description="Builds an index of a corpus; started again after a stop, it goes on.",
    )
    add_source(parser, BUILT, name="hashed", is_required=True)
    add_build(parser)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    require("scipy", INSTALL)
    # Not above: --help answers at once, and where nothing but the base packages is installed.
    from retriever.corpus.passages import load_corpus
    from retriever.indexing.builder import build_index
    from retriever.indexing.options import BuildOptions

    corpus = load_corpus(arguments.corpus_path)
    options = BuildOptions(arguments.retriever_name, arguments.retriever_model, **given_build(arguments))
    build_index(corpus, arguments.index_path, options)
    sys.stdout.write(f"{len(corpus)} passages indexed in {arguments.index_path}\n")


def main(argv: list[str] | None = None) -> int:
    return status_of(
        lambda: run(parse(argv)), "interrupted; give the same command again: what was encoded is kept"
    )


if __name__ == "__main__":
    sys.exit(main())
