"""``python -m retriever.build_index --corpus_path FILE --index_path FOLDER``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m retriever.build_index", description=__doc__)
    parser.add_argument("--corpus_path", type=Path, required=True, help="JSONL of {id, contents}, or .gz")
    parser.add_argument("--index_path", type=Path, required=True, help="folder to write")
    parser.add_argument("--retriever_name", default="hashed", help="encoder (default: %(default)s)")
    parser.add_argument("--factory", default="Flat", help="FAISS factory string (default: %(default)s)")
    arguments = parser.parse_args(argv)

    from retriever.corpus import load_corpus
    from retriever.errors import RetrieverError
    from retriever.index import build_index

    try:
        corpus = load_corpus(arguments.corpus_path)
        build_index(corpus, arguments.index_path, arguments.retriever_name, arguments.factory)
    except RetrieverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{len(corpus)} passages indexed in {arguments.index_path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
