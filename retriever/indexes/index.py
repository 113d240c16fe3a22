"""Builds an index in a folder; a stopped build continues. Opens it, and searches its corpus."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from retriever.backends import LEXICAL, BuildOptions, IndexOptions, find_kind
from retriever.corpus.passages import Corpus
from retriever.encoders.dense import encode_on_devices
from retriever.encoders.hashed import HashedEncoder
from retriever.encoders.registry import check_dimension, check_vector, load_encoder, make_encoder
from retriever.encoders.tokenizer import tokenize, words_version
from retriever.errors import RetrieverError
from retriever.files import atomic_folder, atomic_write
from retriever.indexes.backend import (
    AGAIN,
    MANIFEST,
    Backend,
    Build,
    Embeddings,
    check_files,
    checksums,
    load_backend,
    locked,
    progress_bar,
    read_manifest,
    require_disk,
    shard_path,
)
from retriever.indexes.faiss import FLAT, map_flat, read_header
from retriever.interfaces import CorpusRow, Encoder, Hits, Ranker, Vectors

SETTINGS = "settings.json"
BLOCK = 2048  # passages encoded at once


def build_index(
    corpus: Corpus, folder: Path, options: BuildOptions | None = None, progress: bool = True
) -> None:
    """Encode the corpus and write the index; started again after a stop, it continues.

    Raises RetrieverError: unknown encoder, factory or option; the folder holds something else; too little
    memory or disk; embeddings started with other settings.
    """
    options = options or BuildOptions()
    options.check()
    name, kind = options.retriever_name, options.index_kind
    backend = load_backend(kind, building=True)
    backend.check(options)
    with _writing(folder), locked(folder):
        is_used = folder.is_file() or (folder.exists() and any(folder.iterdir()))
        if is_used and not (folder / MANIFEST).is_file():
            raise RetrieverError(f"{folder}: exists and is not an index; choose another --index_path")
        manifest: dict[str, Any] = {"corpus_sha256": corpus.sha256, "documents": len(corpus)}
        manifest |= words_version(name) | {"kind": kind, "encoder": name}
        shards = options.embeddings or folder.with_name(folder.name + ".embeddings")
        embeddings = None
        if find_kind(kind).has_vectors:
            with locked(shards), _writing(shards):
                embeddings = embed(corpus, shards, options, progress, backend)
            encoder = embeddings.encoder
            manifest |= {"encoder": encoder.name, "model": encoder.model, "dimension": encoder.dimension}
        with atomic_folder(folder) as unfinished, _writing(unfinished):
            if embeddings:
                embeddings.encoder.save(unfinished)
            entries = backend.write(Build(unfinished, corpus, options, embeddings, progress))
            sums = checksums(unfinished, unfinished.glob(find_kind(kind).checked_files))
            manifest |= {"factory": kind} | entries | {"checksums": sums}
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        if embeddings and options.embeddings is None:
            shutil.rmtree(shards)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{folder}: cannot be written ({error.strerror or error})"
        advice = "make room or name another folder, and start again: what was encoded is kept"
        raise RetrieverError(f"{problem}; {advice}") from error


def embed(
    corpus: Corpus,
    folder: Path,
    options: BuildOptions,
    progress: bool = True,
    backend: Backend | None = None,
) -> Embeddings:
    """Encode all passages; complete shards of an earlier start are kept.

    The backend that will write the index is prepared first. Raises RetrieverError: the folder was started
    with other settings, or the disk is too small.
    """
    settings = {
        "corpus_sha256": corpus.sha256,
        "documents": len(corpus),
        "encoder": options.retriever_name,
        "model": options.retriever_model,
        "shard_rows": options.shard_rows,
        "dtype": options.embedding_dtype,
    } | words_version(options.retriever_name)
    is_resumed = (folder / SETTINGS).is_file()
    if is_resumed:
        previous = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        changed = [key for key, value in settings.items() if previous.get(key) != value]
        if changed:
            changes = [f"{key} was {previous.get(key)!r} and is {settings[key]!r}" for key in changed]
            problem = f"{folder}: started with other settings ({', '.join(changes)})"
            raise RetrieverError(f"{problem}; restore or delete it")
        encoder = load_encoder(folder, options.retriever_name, options.retriever_model)
    else:
        encoder = make_encoder(options.retriever_name, options.retriever_model, corpus)
    if backend:
        backend.prepare(encoder.dimension, options, folder)
    if not is_resumed:
        if folder.exists() and any(folder.iterdir()):
            raise RetrieverError(f"{folder}: exists and holds no embeddings; choose another --embeddings")
        with atomic_folder(folder) as unfinished:
            encoder.save(unfinished)
            (unfinished / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    rows, dtype = options.shard_rows, np.dtype(options.embedding_dtype)
    shards = [range(start, min(start + rows, len(corpus))) for start in range(0, len(corpus), rows)]
    missing = [shard for shard in shards if not shard_path(folder, shard.start, rows).is_file()]
    passages = sum(map(len, missing))
    alternatives = "use another --embeddings folder or --embedding_dtype float16"
    require_disk(folder, passages * encoder.dimension * dtype.itemsize, "the vectors need", alternatives)
    devices = options.devices.split(",") if options.devices else []
    block = BLOCK * max(1, 4 * len(devices))
    done = len(corpus) - passages
    with encode_on_devices(encoder, devices), progress_bar(len(corpus), "encode", progress, done) as bar:
        for shard in missing:
            _encode(corpus, encoder, shard, shard_path(folder, shard.start, rows), dtype, block, bar)
    return Embeddings(folder, encoder, len(corpus), rows)


def _encode(
    corpus: Corpus, encoder: Encoder, rows: range, path: Path, dtype: np.dtype, block: int, bar: Any
) -> None:
    # Written, not mapped: on a full disk a mapping ends the process without a message.
    with atomic_write(path) as partial, partial.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, header | {"shape": (len(rows), encoder.dimension)})
        for first in rows[::block]:
            last = min(first + block, rows.stop)
            file.write(encoder.encode_passages(corpus[first:last]).astype(dtype).data)
            bar.update(last - first)


SPARE = 16  # passages fetched in place of those that turn out to be noise


class Dense:
    """Ranks rows by an encoder and an index of vectors."""

    def __init__(self, encoder: Encoder, vectors: Vectors):
        self.encoder, self.documents = encoder, vectors.documents
        self._vectors = vectors

    def rank(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        return self._vectors.nearest(self.encoder.encode_queries(queries), k)


class Index:
    """Searches a corpus. Any number of threads may call it.

    A hit of the hashed encoder has a word of the query and a score above 0: its projection gives all other
    passages a little noise.
    """

    def __init__(self, corpus: Corpus, ranker: Ranker, manifest: dict[str, Any]):
        self.corpus, self.manifest = corpus, manifest
        self._ranker = ranker
        self._is_noisy = manifest.get("encoder") == HashedEncoder.name

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the k best rows of each query with their scores, best first; ties in corpus order."""
        if not queries:
            return []
        fetched = min(k + SPARE * self._is_noisy, len(self.corpus))
        scores, ids = self._ranker.rank(queries, fetched)
        ranked = zip(queries, scores.tolist(), ids.tolist(), strict=True)
        return [list(islice(self._hits(*ranking), k)) for ranking in ranked]

    def _hits(self, query: str, scores: list[float], ids: list[int]) -> Iterator[tuple[CorpusRow, float]]:
        query_words = set(tokenize(query)) if self._is_noisy else set()
        for score, i in zip(scores, ids, strict=True):
            if i < 0:
                continue
            row = self.corpus[i]
            if not self._is_noisy or (score > 0 and not query_words.isdisjoint(tokenize(row["contents"]))):
                yield row, score


def open_index(path: Path, corpus: Corpus, options: IndexOptions | None = None) -> Index:
    """Load an index that was built from exactly this corpus: a folder, or a bare FAISS file.

    Raises RetrieverError: it is missing, damaged or too large, belongs to another corpus, or the options do
    not fit it.
    """
    options = options or IndexOptions()
    if path.is_file():
        return _open_file(path, corpus, options)
    manifest = read_manifest(path)
    _check_source(path, manifest, corpus, options)
    options.check(manifest["kind"])
    kind = manifest["kind"] = options.engine or manifest["kind"]
    options.check(kind)
    backend = load_backend(kind)
    encoder = None
    if find_kind(kind).has_vectors:
        model = options.retriever_model or manifest.get("model", "")
        encoder = load_encoder(path, manifest["encoder"], model)
    if encoder and (sizes := backend.sizes(path, manifest)):
        _check_count(path, sizes[0], corpus)
        check_dimension(path, sizes[1], encoder)
    if not options.skip_checksum:
        check_files(path, manifest)
    index: Any = backend.open(path, manifest, options)
    _check_count(path, index.documents, corpus)
    if encoder:
        check_dimension(path, index.dimension, encoder)
    return Index(corpus, Dense(encoder, index) if encoder else index, manifest)


def _open_file(path: Path, corpus: Corpus, options: IndexOptions) -> Index:
    """Open a FAISS file without a manifest: only sizes, dimension and the first vector can be checked."""
    name, engine = options.retriever_name, options.engine or "faiss"
    if name in ("", *LEXICAL):
        raise RetrieverError(f"{path}: has no manifest: set --retriever_name to e5, bge or dense")
    options.check(engine)
    header = read_header(path)
    _check_count(path, header.documents, corpus)
    encoder = make_encoder(name, options.retriever_model, corpus)
    check_dimension(path, header.dimension, encoder)
    index: Any = load_backend(engine).open(path, {}, options)
    if header.kind == FLAT:
        check_vector(f"{path}, first passage", map_flat(path)[0], corpus[0], encoder)
    manifest = {"corpus_sha256": corpus.sha256, "documents": len(corpus), "kind": engine}
    manifest |= {"encoder": encoder.name, "model": encoder.model, "dimension": encoder.dimension}
    factory = "Flat" if header.kind == FLAT else header.kind.decode()
    manifest |= {"factory": factory, "bytes": path.stat().st_size}
    return Index(corpus, Dense(encoder, index), manifest)


def _check_source(folder: Path, manifest: dict[str, Any], corpus: Corpus, options: IndexOptions) -> None:
    if manifest["corpus_sha256"] != corpus.sha256:
        sizes = f"{manifest['documents']} passages; this one has {len(corpus)}"
        raise RetrieverError(f"{folder}: built from another corpus ({sizes}); {AGAIN}")
    if manifest.get("words") != words_version(manifest["encoder"]).get("words"):
        raise RetrieverError(f"{folder}: split into words by another version of this program; {AGAIN}")
    if options.retriever_name and options.retriever_name != manifest["encoder"]:
        raise RetrieverError(f"--retriever_name: {folder} was built with {manifest['encoder']}; leave it out")


def _check_count(path: Path, documents: int, corpus: Corpus) -> None:
    if documents != len(corpus):
        problem = f"{path}: holds {documents:,} vectors and the corpus {corpus.path} {len(corpus):,} passages"
        raise RetrieverError(f"{problem}; set --corpus_path to the corpus that it was built from")
