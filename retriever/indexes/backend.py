"""The base class of index backends, which build and open indexes. Subclass it for another kind of index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retriever.backends import ADVICE, BuildOptions, IndexOptions, find_kind, load_object
from retriever.corpus.passages import Corpus
from retriever.errors import RetrieverError, require
from retriever.indexes.embeddings import Embeddings
from retriever.interfaces import Ranker, Vectors


@dataclass(frozen=True)
class Build:
    """The input of `Backend.write`.

    Attributes:
        folder: The folder to write into. It holds nothing but the encoder's file, and gets its final name
            when the build has succeeded: files in it must not name it.
        corpus: The rows, in the order of the row numbers.
        options: The options of the builder; ``options[NAME]`` is one of the kind's own.
        embeddings: The vectors; None for a kind without vectors. `Embeddings.shards` yields them in corpus
            order as float32 or float16, whichever --embedding_dtype says.
        progress: Whether to show a progress bar.
    """

    folder: Path
    corpus: Corpus
    options: BuildOptions
    embeddings: Embeddings | None
    progress: bool


class Backend:
    """Builds and opens the indexes of a kind.

    A subclass is named as an entry of KINDS or by ``--kind package.module:Class``. It is made without
    arguments, for each build and for each start of the service. It must define `write` and `open`.
    """

    def check(self, options: BuildOptions) -> None:
        """Refuse wrong values, before a build reads or writes anything. By default all are accepted.

        Args:
            options: The options of the builder; their names are checked already.

        Raises:
            RetrieverError: A value is wrong.
        """

    def prepare(self, dimension: int, options: BuildOptions, shards: Path) -> None:
        """Refuse a build that `write` could not finish, before the corpus is encoded. By default do nothing.

        It is called by builds of a kind with vectors, also by those that continue an earlier one.

        Args:
            dimension: Number of elements D of each vector.
            options: The options of the builder.
            shards: The folder of the vectors, which need not exist yet. A backend may keep a file there that
                says how far an earlier build came.

        Raises:
            RetrieverError: `write` would fail.
        """

    def write(self, build: Build) -> dict[str, Any]:
        """Write the index.

        Args:
            build: The vectors or the rows, the options, and the folder to write into.

        Returns:
            Entries of the manifest, as JSON values. `open` gets them back. They must hold whatever decides
            results, because the identity of the index is a hash of them. `factory`, the type of the index,
            is the name of the kind if it is not among them.

        Raises:
            RetrieverError: The index cannot be built.
            OSError: The folder cannot be written, for example because the disk is full.
        """
        raise NotImplementedError

    def sizes(self, folder: Path, manifest: dict[str, Any]) -> tuple[int, int] | None:
        """Return the sizes of an index without reading it whole, to refuse a wrong one early.

        Args:
            folder: The folder of the index.
            manifest: Its manifest.

        Returns:
            Number of vectors and their dimension D; None, the default, if they are unknown until the index
            is opened.

        Raises:
            RetrieverError: A file is missing or damaged.
        """
        return None

    def open(self, folder: Path, manifest: dict[str, Any], options: IndexOptions) -> Vectors | Ranker:
        """Open what `write` wrote.

        Args:
            folder: The folder of the index.
            manifest: Its manifest. Entries may be changed: the service shows them and hashes them.
            options: Options of the service; those that have no meaning for the kind are refused before.

        Returns:
            An `interfaces.Vectors`: an object with `documents`, `dimension` and ``nearest(vectors, k)``. A
            kind without vectors returns an `interfaces.Ranker`. Its methods are called by several threads.

        Raises:
            RetrieverError: A file is missing or damaged, or the index is too large.
        """
        raise NotImplementedError


def load_backend(kind: str, building: bool = False) -> Backend:
    """Return the backend of a kind of index.

    Args:
        kind: Name of an entry of KINDS, or ``package.module:Class``.
        building: Whether to require the package that builds the index instead of the one that searches it.

    Returns:
        An instance of the kind's subclass of Backend.

    Raises:
        RetrieverError: The kind is unknown, its package is not installed, or its class is no Backend.
    """
    entry = find_kind(kind)
    package = entry.package
    if building and entry.build_package:
        package = entry.build_package
    if package:
        require(package, ADVICE.get(package, f"pip install {package}"))
    backend = load_object(entry.backend)
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise RetrieverError(f"--kind {kind}: not a subclass of retriever.indexes.backend.Backend")
    return backend()
