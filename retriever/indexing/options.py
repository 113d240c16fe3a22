"""What a builder can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retriever.errors import RetrieverError
from retriever.search.backends.qdrant import search_params
from retriever.search.manifest import BM25, KINDS

DTYPES = ("float32", "float16")
QUANTIZATIONS = ("", "int8", "binary")


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
    qdrant_shards: int = 1  # of the collection; a multiple of the cluster's nodes spreads it evenly
    qdrant_replicas: int = 1  # copies of each shard
    qdrant_on_disk: bool = False  # full vectors stay on disk
    qdrant_quantization: str = ""  # int8 or binary codes in memory; empty: none
    qdrant_parallel: int = 4  # requests of the upload at once

    def check(self) -> None:
        """Raises RetrieverError if a value is unknown or two do not go together."""
        if self.kind not in KINDS:
            raise RetrieverError(f"--kind {self.kind!r} is unknown; available are {', '.join(KINDS)}")
        if self.embedding_dtype not in DTYPES:
            raise RetrieverError(
                f"--embedding_dtype {self.embedding_dtype!r}: choose from {', '.join(DTYPES)}"
            )
        for name in ("qdrant_shards", "qdrant_replicas", "qdrant_parallel"):
            if getattr(self, name) < 1:
                raise RetrieverError(f"--{name} {getattr(self, name)}: must be 1 or more")
        if self.qdrant_quantization not in QUANTIZATIONS:
            raise RetrieverError(f"--qdrant_quantization {self.qdrant_quantization!r}: choose int8 or binary")
        if self.kind == "qdrant":
            search_params(self.search)
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
