"""Registry of index backends: an entry of KINDS owns everything about a kind of index.

Imports nothing heavy: the command lines read their options from it.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retriever.errors import RetrieverError, reason

DTYPES = ("float32", "float16")
ENGINES = ("faiss", "jax")  # kinds that can search a flat FAISS file
ADVICE = {  # package -> what to do without it
    "faiss": "pip install faiss-cpu (or faiss-gpu on CUDA)",
    "jax": "pip install jax (or jax[tpu]), or leave out --engine jax",
    "qdrant_client": "pip install qdrant-client",
}


@dataclass(frozen=True)
class Option:
    """An option of the command line; False as the default makes it a switch."""

    help: str
    default: Any = ""
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        if self.choices and value not in self.choices:
            raise RetrieverError(f"--{name} {value!r}: choose from {', '.join(filter(None, self.choices))}")


@dataclass(frozen=True)
class Remote:
    """A search service that needs neither a corpus nor an index folder."""

    searcher: str  # package.module:Class of an `interfaces.Searcher`, made from the service's options
    is_chosen: Callable[[Namespace], bool]
    needed: tuple[str, ...]  # options that must be given
    unused: tuple[str, ...]  # options that must not be given
    shared: tuple[str, ...] = ()  # options of the builder that it takes too
    workers: int = 0  # searches at the same time; 0: one for each core


@dataclass(frozen=True)
class Kind:
    """A kind of index: how it is built and opened, its options, and the package that it needs."""

    backend: str = ""  # package.module:Class, a subclass of `indexes.backend.Backend`; empty: no index folder
    package: str = ""  # searches it; empty: the backend imports its own
    build_package: str = ""  # builds it; empty: the same
    has_vectors: bool = True  # False: it ranks texts by itself, and --retriever_name selects it
    has_factory: bool = False  # --factory selects the type of index
    open_options: tuple[str, ...] = ()  # fields of IndexOptions that it takes
    checked_files: str = "**/*"  # pattern of the files that do not change while they are served
    build_options: Mapping[str, Option] = field(default_factory=dict)  # of its own, for the builder
    serve_options: Mapping[str, Option] = field(default_factory=dict)  # of its own, for the service
    remote: Remote | None = None


WEB_NAMES = ("serpapi",)  # values of --retriever_name
WEB_OPTIONS = {
    "web_budget": Option("web search: largest number of requests to send in all", 0),
    "web_endpoint": Option("web search: another address of the same API"),
}

KINDS: dict[str, Kind] = {
    "faiss": Kind(
        "retriever.indexes.faiss:FaissBackend",
        package="faiss",
        has_factory=True,
        open_options=("engine", "faiss_gpu", "mmap"),
    ),
    "jax": Kind(  # a flat FAISS file, searched on accelerators
        "retriever.indexes.jax:JaxBackend",
        package="jax",
        build_package="faiss",
        open_options=("engine",),
    ),
    "bm25": Kind("retriever.indexes.bm25:Bm25Backend", has_vectors=False, open_options=("mmap",)),
    "qdrant": Kind(
        "retriever.contrib.qdrant:QdrantBackend",
        package="qdrant_client",
        checked_files="*",  # the embedded mode's own files change
        build_options={
            "qdrant_url": Option("address of the Qdrant server (default: embedded in the index's folder)"),
            "qdrant_collection": Option("name of the collection to make", "passages"),
            "qdrant_on_disk": Option("leave the full vectors on disk", False),
            "qdrant_quantization": Option("codes in memory: int8 (default: none)", choices=("", "int8")),
        },
        serve_options={
            "qdrant_search": Option("search parameters: hnsw_ef=128,oversampling=2; or exact=true"),
            "qdrant_text": Option("field of a collection's payload that holds the text", "contents"),
        },
        remote=Remote(
            "retriever.contrib.qdrant:Collection",
            is_chosen=lambda options: bool(options.qdrant_url) and not options.index_path,
            needed=("qdrant_collection", "retriever_name"),
            unused=("corpus_path", *WEB_OPTIONS),
            shared=("qdrant_url", "qdrant_collection"),
        ),
    ),
    "web": Kind(
        serve_options=WEB_OPTIONS,
        remote=Remote(
            "retriever.contrib.web:WebSearch",
            is_chosen=lambda options: options.retriever_name in WEB_NAMES,
            needed=("cache_path", "web_budget"),
            unused=("corpus_path", "index_path", "retriever_model"),
            workers=1,  # equal queries of two searches would be paid for twice
        ),
    ),
}
VECTOR_KINDS = ", ".join(name for name, kind in KINDS.items() if kind.backend and kind.has_vectors)
LEXICAL = ("hashed", *(name for name, kind in KINDS.items() if not kind.has_vectors))  # count words


@dataclass(frozen=True)
class BuildOptions:
    """The fields are named as the options of ``python -m retriever.build_index``."""

    retriever_name: str = "hashed"  # hashed, e5, bge, dense or bm25
    retriever_model: str = ""  # folder or hub name of the encoder's model; empty: the name's own
    kind: str = "faiss"  # a kind with vectors, or package.module:Class
    factory: str = "Flat"  # FAISS factory string; Flat is exact
    search: str = ""  # search parameters kept in the index, such as nprobe=32
    embeddings: Path | None = None  # folder of the vectors, kept; None: beside the index, then removed
    embedding_dtype: str = "float32"  # of the kept vectors, one of DTYPES
    shard_rows: int = 2**18  # passages in a file of vectors
    devices: str = ""  # such as cuda:0,cuda:1 or cpu,cpu: a process each encodes; empty: this process
    settings: Mapping[str, Any] = field(default_factory=dict)  # the kind's own build options

    @property
    def index_kind(self) -> str:
        return self.retriever_name if _ranks_texts(self.retriever_name) else self.kind

    def __getitem__(self, name: str) -> Any:
        """Return the value of one of the kind's own build options."""
        return self.settings.get(name, find_kind(self.kind).build_options[name].default)

    def check(self) -> None:
        """Raise RetrieverError if a value is unknown or two do not go together."""
        kind = find_kind(self.kind)
        if _ranks_texts(self.kind):
            raise RetrieverError(f"--kind {self.kind}: set --retriever_name {self.kind} instead")
        if self.embedding_dtype not in DTYPES:
            raise RetrieverError(f"--embedding_dtype {self.embedding_dtype!r}: choose from {DTYPES}")
        if self.shard_rows < 1:
            raise RetrieverError(f"--shard_rows {self.shard_rows}: must be 1 or more")
        if self.devices and self.retriever_name in LEXICAL:
            raise RetrieverError(f"--devices: {self.retriever_name} has no network; leave it out")
        if _ranks_texts(self.retriever_name) and self != BuildOptions(self.retriever_name):
            problem = f"--retriever_name {self.retriever_name} has no vectors"
            raise RetrieverError(f"{problem}: leave out their options")
        foreign = {name: value for name, value in self.settings.items() if name not in kind.build_options}
        if self.factory != "Flat" and not kind.has_factory:
            foreign["factory"] = self.factory
        for name, value in foreign.items():
            raise RetrieverError(f"--{name} {value}: --kind {self.kind} has none; leave it out")
        for name, value in self.settings.items():
            kind.build_options[name].check(name, value)


@dataclass(frozen=True)
class IndexOptions:
    """How an index is opened; the fields are named as the service's options."""

    retriever_name: str = ""  # hashed, e5, bge, dense or bm25; empty: as the manifest says
    retriever_model: str = ""  # folder or hub name; empty: as the manifest says, or the name's own
    engine: str = ""  # the kind that searches the file; empty: as it was built
    faiss_gpu: bool = False
    mmap: bool = False
    threads: int = 0  # cores to use; 0: all
    skip_checksum: bool = False  # a large file on a slow disk takes minutes to read
    settings: Mapping[str, Any] = field(default_factory=dict)  # given service options of a kind's own

    def check(self, kind: str) -> None:
        """Raise RetrieverError if an option has no meaning for a kind of index."""
        entry = find_kind(kind)
        if self.engine and self.engine not in ENGINES:
            raise RetrieverError(f"--engine {self.engine!r} is unknown; available are faiss and jax")
        names = [name for name in ("engine", "faiss_gpu", "mmap") if getattr(self, name)]
        names += ["retriever_model"] if self.retriever_model and not entry.has_vectors else []
        for name in (*names, *self.settings):
            if name not in (*entry.open_options, *entry.serve_options):
                raise RetrieverError(f"--{name}: has no meaning for an index of kind {kind}; leave it out")


def find_kind(name: str) -> Kind:
    """Return the entry of a kind, or a plain one for package.module:Class; raises RetrieverError."""
    if name in KINDS and KINDS[name].backend:
        return KINDS[name]
    if ":" in name:
        return Kind(name)
    raise RetrieverError(f"--kind {name!r} is unknown: choose {VECTOR_KINDS} or package.module:Class")


def find_remote(options: Namespace) -> Remote | None:
    """Return the search service that the options choose, if they choose one."""
    remotes = (kind.remote for kind in KINDS.values() if kind.remote)
    return next((remote for remote in remotes if remote.is_chosen(options)), None)


def load_object(address: str) -> Any:
    """Import ``package.module:name``. Raises RetrieverError: no such module or name."""
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        advice = ADVICE.get(getattr(error, "name", "") or "", "correct the name")
        problem = f"{address}: not an importable package.module:Class ({reason(error)})"
        raise RetrieverError(f"{problem}; {advice}") from error


def _ranks_texts(name: str) -> bool:
    return name in KINDS and not KINDS[name].has_vectors
