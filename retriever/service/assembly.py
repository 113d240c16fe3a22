"""Puts the service together from its options: index, reranker, result store, pages and limits."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fastapi import FastAPI

from retriever.backends import find_remote, load_object
from retriever.corpus.pages import Pages
from retriever.corpus.passages import Corpus, load_corpus
from retriever.encoders.reranker import Reranker
from retriever.errors import RetrieverError
from retriever.indexes.build import build_index
from retriever.indexes.index import Index, open_index
from retriever.indexes.lock import Locked, wait_until_unlocked
from retriever.indexes.manifest import MANIFEST, read_manifest
from retriever.indexes.resources import available_cores
from retriever.interfaces import Searcher
from retriever.options import build_options, index_options, read_token
from retriever.service.app import make_app
from retriever.service.cache import ResultCache
from retriever.service.hosts import is_loopback
from retriever.service.limits import Limits
from retriever.service.loading import ReportStage


def _ignore_stage(stage: str) -> None:
    """Report no stage."""


def load(arguments: argparse.Namespace, report: ReportStage = _ignore_stage) -> FastAPI:
    """Load what the options say and return the application.

    Args:
        arguments: Options of the service, as `options.parse` returns them.
        report: Called with each stage of loading.

    Returns:
        The ASGI application.

    Raises:
        RetrieverError: Something is missing, or does not fit the rest.
    """
    token = read_token(arguments)
    if not is_loopback(arguments.host) and not token:
        sys.stderr.write(f"warning: {arguments.host} is open to the network without --token_file\n")
    searcher = _load_searcher(arguments, report)
    reranker = None
    if arguments.reranker_model:
        report("loading the reranker")
        reranker = Reranker(arguments.reranker_model, arguments.reranker_batch_size)
    cache = None
    if arguments.cache_path is not None:
        cache = ResultCache(arguments.cache_path, searcher.manifest, arguments.cache_mode)
    pages = None
    if arguments.pages_path is not None:
        report("reading the pages")
        pages = Pages(arguments.pages_path)
    return make_app(
        searcher,
        arguments.retrieval_topk,
        arguments.reranking_topk,
        reranker=reranker,
        cache=cache,
        pages=pages,
        limits=_limits(arguments),
        token=token,
    )


def _load_searcher(arguments: argparse.Namespace, report: ReportStage) -> Searcher:
    """Return the search service or the index that the options choose."""
    remote = find_remote(arguments)
    if remote is None:
        return load_index(arguments, report)
    report(f"opening {remote.searcher}")
    searcher: Searcher = load_object(remote.searcher)(arguments)
    return searcher


def _limits(arguments: argparse.Namespace) -> Limits:
    return Limits(
        max_batch=arguments.max_batch,
        max_queue=arguments.max_queue,
        max_queries=arguments.max_queries,
        max_results=arguments.max_results,
        workers=_workers(arguments),
        request_seconds=arguments.request_seconds,
    )


def _workers(arguments: argparse.Namespace) -> int:
    """Return how many searches run at the same time: one on each core, unless the kind says otherwise."""
    remote = find_remote(arguments)
    if remote is not None and remote.workers:
        return remote.workers
    if arguments.threads:
        return arguments.threads
    threads_per_search = int(os.environ.get("OMP_NUM_THREADS") or 1)
    return max(1, available_cores() // threads_per_search)


def load_index(arguments: argparse.Namespace, report: ReportStage) -> Index:
    """Open the index over its corpus; with --build_if_missing it is built first if it is missing.

    Args:
        arguments: Options of the service, as `options.parse` returns them.
        report: Called with each stage of loading.

    Returns:
        The index, ready to search.

    Raises:
        RetrieverError: As `load_corpus`, `build_index` and `open_index`; or the index was built with another
            --kind or --factory than the options say.
    """
    path = arguments.index_path
    report(f"reading the corpus {arguments.corpus_path}")
    corpus = load_corpus(arguments.corpus_path)
    if arguments.build_if_missing and not _has_index(path):
        _build_missing(corpus, arguments, report)
    elif arguments.build_if_missing and path.is_dir():
        manifest = read_manifest(path)
        for name in ("kind", "factory"):
            value = getattr(arguments, name)
            if value is not None and value != manifest[name]:
                raise RetrieverError(
                    f"--{name} {value}: {path} was built with {manifest[name]}; leave the option out, or"
                    " choose another --index_path"
                )
    report(f"loading the index {path} over {len(corpus):,} passages")
    return open_index(path, corpus, index_options(arguments))


def _has_index(path: Path) -> bool:
    return path.is_file() or (path / MANIFEST).is_file()


def _build_missing(corpus: Corpus, arguments: argparse.Namespace, report: ReportStage) -> None:
    """Build the index, or wait for another process that builds it."""
    path = arguments.index_path
    while not _has_index(path):
        report(f"building the index {path} over {len(corpus):,} passages")
        try:
            build_index(corpus, path, build_options(arguments))
        except Locked as error:
            report(f"waiting for another process, which builds {error.folder}")
            wait_until_unlocked(error.folder)
