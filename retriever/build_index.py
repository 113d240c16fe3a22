"""``python -m retriever.build_index --corpus_path FILE --index_path FOLDER``; started again, it goes on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m retriever.build_index", description=__doc__)
    add = parser.add_argument
    add("--corpus_path", type=Path, required=True, help="JSONL of {id, contents}, or .gz")
    add("--index_path", type=Path, required=True, help="folder to write")
    add("--retriever_name", default="hashed", help="hashed, e5, bge, dense or bm25 (default: %(default)s)")
    add("--retriever_model", default="", help="sentence-transformers folder or hub name")
    add("--kind", default="faiss", help="faiss, jax or qdrant (default: %(default)s)")
    add("--factory", default="Flat", help="FAISS factory string (default: %(default)s)")
    add("--search", default="", help="FAISS search parameters kept in the index, such as nprobe=32")
    add("--embeddings", type=Path, help="folder of the vectors, kept for further indexes")
    add("--embedding_dtype", default="float32", help="float32 or float16 (default: %(default)s)")
    add("--shard_rows", type=int, default=2**18, help="passages a file of vectors (default: %(default)s)")
    add("--qdrant_url", default="", help="server; empty: embedded in the index's folder")
    add("--qdrant_collection", default="passages", help="collection to make (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)

    from retriever.builder import BuildOptions, build_index
    from retriever.corpus import load_corpus
    from retriever.errors import RetrieverError

    options = BuildOptions(
        model=arguments.retriever_model,
        kind=arguments.kind,
        search=arguments.search,
        embeddings=arguments.embeddings,
        shard_rows=arguments.shard_rows,
        dtype=arguments.embedding_dtype,
        qdrant_url=arguments.qdrant_url,
        qdrant_collection=arguments.qdrant_collection,
    )
    try:
        corpus = load_corpus(arguments.corpus_path)
        build_index(
            corpus, arguments.index_path, arguments.retriever_name, arguments.factory, options=options
        )
    except RetrieverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{len(corpus)} passages indexed in {arguments.index_path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
