"""Registry of index backends: an entry of KINDS holds everything that is specific to a kind of index.

Imports nothing heavy: the command lines read their options from it.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from retriever.errors import RetrieverError, reason

# Values of --embedding_dtype.
DTYPES = ("float32", "float16")
# Kinds that can search a flat FAISS file; values of --engine.
ENGINES = ("faiss", "jax")
# What to do when a package is not installed.
ADVICE = {
    "faiss": "pip install faiss-cpu (or faiss-gpu on CUDA)",
    "jax": "pip install jax (or jax[tpu]), or leave out --engine jax",
    "qdrant_client": "pip install qdrant-client",
}
# Values of --retriever_name that search the web.
WEB_NAMES = ("serpapi", "serper", "searxng")


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    Attributes:
        help: Text for ``--help``.
        default: The value without the option; its type is the option's, and False makes it a switch.
        choices: Allowed values; empty if every value is allowed.
    """

    help: str
    default: Any = ""
    choices: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise RetrieverError if `value` of the option `name` is not one of the choices."""
        if not self.choices or value in self.choices:
            return
        shown = [choice for choice in self.choices if choice]
        raise RetrieverError(f"--{name} {value!r}: choose from {', '.join(shown)}")


@dataclass(frozen=True)
class Remote:
    """A search service that needs neither a corpus nor an index folder.

    Attributes:
        searcher: ``package.module:Class`` of an `interfaces.Searcher`, made from the service's options.
        is_chosen: Returns whether the options select this service.
        required_options: Options that must be given.
        excluded_options: Options that must not be given.
        builder_options: Options of the builder that it takes too.
        workers: Number of searches at the same time; 0 for one on each core.
    """

    searcher: str
    is_chosen: Callable[[Namespace], bool]
    required_options: tuple[str, ...]
    excluded_options: tuple[str, ...]
    builder_options: tuple[str, ...] = ()
    workers: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of index: how it is built and opened, its options, and the package that it needs.

    Attributes:
        backend: ``package.module:Class``, a subclass of `indexes.backend.Backend`; empty for a kind without
            an index folder.
        package: The package that searches it; empty if the backend imports its packages itself.
        build_package: The package that builds it; empty if `package` does.
        has_vectors: False for a kind that ranks texts by itself; --retriever_name selects it then.
        has_factory: Whether --factory selects the type of index.
        open_options: Fields of IndexOptions that it takes.
        checked_files: Pattern of the files that do not change while they are served, and get a checksum.
        build_options: Its own options of the builder, by name.
        serve_options: Its own options of the service, by name.
        remote: The search service that can be used in place of an index folder.
    """

    backend: str = ""
    package: str = ""
    build_package: str = ""
    has_vectors: bool = True
    has_factory: bool = False
    open_options: tuple[str, ...] = ()
    checked_files: str = "**/*"
    build_options: Mapping[str, Option] = field(default_factory=dict)
    serve_options: Mapping[str, Option] = field(default_factory=dict)
    remote: Remote | None = None


def _is_qdrant_collection(options: Namespace) -> bool:
    """Return whether a Qdrant server is named without an index folder."""
    return bool(options.qdrant_url) and not options.index_path


def _is_web_search(options: Namespace) -> bool:
    return options.retriever_name in WEB_NAMES


WEB_OPTIONS = {
    "web_budget": Option("web search: largest number of requests to send in all", 0),
    "web_endpoint": Option("web search: another address of the same API; SearXNG's has no default"),
}

# Options of the service that say how the folder of an index is opened.
FOLDER_OPTIONS = ("engine", "faiss_gpu", "mmap", "skip_checksum")

KINDS: dict[str, Kind] = {
    "faiss": Kind(
        "retriever.indexes.faiss:FaissBackend",
        package="faiss",
        has_factory=True,
        open_options=("engine", "faiss_gpu", "mmap"),
    ),
    # A flat FAISS file, searched on accelerators.
    "jax": Kind(
        "retriever.indexes.jax:JaxBackend",
        package="jax",
        build_package="faiss",
        open_options=("engine",),
    ),
    "bm25": Kind("retriever.indexes.bm25:Bm25Backend", has_vectors=False, open_options=("mmap",)),
    "qdrant": Kind(
        "retriever.contrib.qdrant:QdrantBackend",
        package="qdrant_client",
        # The files of the embedded mode, in a folder below, change while they are served.
        checked_files="*",
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
            is_chosen=_is_qdrant_collection,
            required_options=("qdrant_collection", "retriever_name"),
            excluded_options=("corpus_path", *FOLDER_OPTIONS, *WEB_OPTIONS),
            builder_options=("qdrant_url", "qdrant_collection"),
        ),
    ),
    "web": Kind(
        serve_options=WEB_OPTIONS,
        remote=Remote(
            "retriever.contrib.web:WebSearch",
            is_chosen=_is_web_search,
            required_options=("cache_path", "web_budget"),
            excluded_options=(
                "corpus_path",
                "index_path",
                "retriever_model",
                *FOLDER_OPTIONS,
                "qdrant_search",
                "qdrant_text",
            ),
            workers=1,  # Two searches at the same time would pay twice for equal queries.
        ),
    ),
}
# Values of --kind, for messages and --help.
VECTOR_KINDS = ", ".join(name for name, kind in KINDS.items() if kind.backend and kind.has_vectors)
# Values of --retriever_name that count words and have no network.
LEXICAL = ("hashed", *(name for name, kind in KINDS.items() if not kind.has_vectors))


@dataclass(frozen=True)
class BuildOptions:
    """Options of building an index; the fields are named as those of ``python -m retriever.build_index``.

    Attributes:
        retriever_name: The encoder: hashed, e5, bge, dense or bm25.
        retriever_model: Folder or hub name of the encoder's model; empty for the default of the name.
        kind: A kind with vectors, or ``package.module:Class``.
        factory: FAISS factory string; Flat is exact.
        search: Search parameters kept in the index, such as nprobe=32.
        embeddings: Folder to keep the vectors in. None: a folder beside the index, removed after the build.
        embedding_dtype: Precision of the kept vectors, one of DTYPES.
        shard_rows: Number of passages in a file of vectors.
        devices: Devices that encode, a process each, such as cuda:0,cuda:1 or cpu,cpu; empty: this process.
        settings: The kind's own build options that were given, by name.
    """

    retriever_name: str = "hashed"
    retriever_model: str = ""
    kind: str = "faiss"
    factory: str = "Flat"
    search: str = ""
    embeddings: Path | None = None
    embedding_dtype: str = "float32"
    shard_rows: int = 2**18
    devices: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def index_kind(self) -> str:
        """The kind of the index: that of --retriever_name if it ranks texts, else --kind."""
        if _ranks_texts(self.retriever_name):
            return self.retriever_name
        return self.kind

    def __getitem__(self, name: str) -> Any:
        """Return the value of one of the kind's own build options, its default if it was not given."""
        default = find_kind(self.kind).build_options[name].default
        return self.settings.get(name, default)

    def check(self) -> None:
        """Raise RetrieverError if a value is unknown or two values do not go together."""
        kind = find_kind(self.kind)
        if _ranks_texts(self.kind):
            raise RetrieverError(f"--kind {self.kind}: set --retriever_name {self.kind} instead")
        if self.embedding_dtype not in DTYPES:
            raise RetrieverError(f"--embedding_dtype {self.embedding_dtype!r}: choose from {DTYPES}")
        if self.shard_rows < 1:
            raise RetrieverError(f"--shard_rows {self.shard_rows}: must be 1 or more")
        if self.devices and self.retriever_name in LEXICAL:
            raise RetrieverError(f"--devices: {self.retriever_name} has no network; leave it out")
        has_only_name = self == BuildOptions(self.retriever_name)
        if _ranks_texts(self.retriever_name) and not has_only_name:
            raise RetrieverError(
                f"--retriever_name {self.retriever_name} has no vectors: leave out the options of vectors"
            )
        for name, value in self.settings.items():
            if name not in kind.build_options:
                self._refuse_option(name, value)
        if self.factory != "Flat" and not kind.has_factory:
            self._refuse_option("factory", self.factory)
        for name, value in self.settings.items():
            kind.build_options[name].check(name, value)

    def _refuse_option(self, name: str, value: Any) -> NoReturn:
        raise RetrieverError(f"--{name} {value}: --kind {self.kind} has none; leave it out")


@dataclass(frozen=True)
class IndexOptions:
    """Options of opening an index; the fields are named as the service's options.

    Attributes:
        retriever_name: The encoder: hashed, e5, bge, dense or bm25; empty: the manifest's.
        retriever_model: Folder or hub name of its model; empty: the manifest's, or the default of the name.
        engine: The kind that searches the file, one of ENGINES; empty: the kind that built it.
        faiss_gpu: Spread the index over all GPUs.
        mmap: Read the parts of the index from disk when they are needed.
        threads: Number of cores to use; 0 for all.
        skip_checksum: Do not compare checksums: reading a large file on a slow disk takes minutes.
        settings: Service options of a kind's own that were given, by name.
    """

    retriever_name: str = ""
    retriever_model: str = ""
    engine: str = ""
    faiss_gpu: bool = False
    mmap: bool = False
    threads: int = 0
    skip_checksum: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def check(self, kind: str) -> None:
        """Raise RetrieverError if an option that was given has no meaning for a kind of index.

        Args:
            kind: Name of an entry of KINDS, or ``package.module:Class``.
        """
        entry = find_kind(kind)
        if self.engine and self.engine not in ENGINES:
            raise RetrieverError(f"--engine {self.engine!r} is unknown; available are faiss and jax")
        given = [name for name in ("engine", "faiss_gpu", "mmap") if getattr(self, name)]
        if self.retriever_model and not entry.has_vectors:
            given.append("retriever_model")
        given += self.settings
        for name in given:
            if name not in entry.open_options and name not in entry.serve_options:
                raise RetrieverError(f"--{name}: has no meaning for an index of kind {kind}; leave it out")


def find_kind(name: str) -> Kind:
    """Return the entry of a kind of index.

    Args:
        name: Name of an entry of KINDS with a backend, or ``package.module:Class``.

    Returns:
        The entry; for ``package.module:Class`` one without options of its own.

    Raises:
        RetrieverError: The name is neither.
    """
    if name in KINDS and KINDS[name].backend:
        return KINDS[name]
    if ":" in name:
        return Kind(name)
    raise RetrieverError(f"--kind {name!r} is unknown: choose {VECTOR_KINDS} or package.module:Class")


def find_remote(options: Namespace) -> Remote | None:
    """Return the search service that the service's options choose, or None for an index folder."""
    for kind in KINDS.values():
        if kind.remote and kind.remote.is_chosen(options):
            return kind.remote
    return None


def load_object(address: str) -> Any:
    """Import an object by its address.

    Args:
        address: ``package.module:name``.

    Returns:
        The object, usually a class.

    Raises:
        RetrieverError: There is no such module or name, or the module needs a package that is not installed.
    """
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        package = getattr(error, "name", None) or ""
        advice = ADVICE.get(package, "correct the name")
        raise RetrieverError(
            f"{address}: not an importable package.module:Class ({reason(error)}); {advice}"
        ) from error


def _ranks_texts(name: str) -> bool:
    return name in KINDS and not KINDS[name].has_vectors
