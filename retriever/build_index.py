"""``python -m retriever.build_index --corpus_path FILE --index_path FOLDER``: builds an index of a corpus.

Started again after a stop, it continues.
"""

from __future__ import annotations

import argparse
import sys

from retriever.errors import require, status_of
from retriever.opening import find_own_module
from retriever.options import BUILT, INSTALL, add_build, add_source, build_options


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the builder; None for `argv` takes those of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m retriever.build_index",
        description="Builds an index of a corpus; started again after a stop, it goes on.",
    )
    add_source(parser, BUILT, name="hashed", is_required=True)
    add_build(parser)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    """Build the index, and say on stdout how many passages it has.

    Args:
        arguments: Options as `parse` returns them.

    Raises:
        RetrieverError: As `load_corpus` and `build_index`; or scipy is not installed.
    """
    require("scipy", INSTALL)
    find_own_module(arguments.kind)
    # Imported here: --help must answer at once, and where only the base packages are installed.
    from retriever.corpus.passages import load_corpus
    from retriever.indexes.build import build_index

    corpus = load_corpus(arguments.corpus_path)
    build_index(corpus, arguments.index_path, build_options(arguments))
    sys.stdout.write(f"{len(corpus)} passages indexed in {arguments.index_path}\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    interrupted = "interrupted; give the same command again: what was encoded is kept"
    return status_of(lambda: run(parse(argv)), interrupted)


if __name__ == "__main__":
    sys.exit(main())
