"""What a builder can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retriever.errors import RetrieverError
from retriever.search.manifest import BM25, KINDS

DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class BuildOptions:
    """The fields are named as the options of ``python -m retriever.build_index``."""

    retriever_name: str = "hashed"  # hashed, e5, bge, dense or bm25
    retriever_model: str = ""  # folder or hub name of the encoder's model; empty: the name's own
    kind: str = "faiss"  # one of KINDS; jax writes a flat FAISS file and searches it on accelerators
    factory: str = "Flat"  # FAISS factory string; Flat is exact
    search: str = ""  # FAISS search parameters kept in the index, such as nprobe=32
    embeddings: Path | None = None  # folder of the shards, kept; None: beside the index, then removed
    embedding_dtype: str = "float32"  # of the shards, one of DTYPES
    shard_rows: int = 2**18
    devices: str = ""  # such as cuda:0,cuda:1 or cpu,cpu: a process each encodes; empty: this process
    qdrant_url: str = ""  # empty: embedded, in the index's folder
    qdrant_collection: str = "passages"

    def check(self) -> None:
        """Raises RetrieverError where a value is unknown or two do not go together."""
        if self.kind not in KINDS:
            raise RetrieverError(f"--kind {self.kind!r} is unknown; available are {', '.join(KINDS)}")
        if self.embedding_dtype not in DTYPES:
            raise RetrieverError(
                f"--embedding_dtype {self.embedding_dtype!r}: choose from {', '.join(DTYPES)}"
            )
        if self.devices and self.retriever_name in ("hashed", BM25):
            raise RetrieverError(
                f"--devices {self.devices}: {self.retriever_name} has no network; leave it out"
            )
        if self.shard_rows < 1:
            raise RetrieverError(f"--shard_rows {self.shard_rows}: must be 1 or more")
        if self.kind != "faiss" and self.factory != "Flat":
            raise RetrieverError(f"--factory {self.factory}: --kind {self.kind} has none; leave it out")
        if self.retriever_name == BM25 and self != BuildOptions(BM25):
            raise RetrieverError("--retriever_name bm25 has no vectors; leave out the options about them")
