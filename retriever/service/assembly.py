"""Puts a service together from its options: index or web, reranker, store, pages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from retriever.corpus.pages import Pages
from retriever.corpus.passages import load_corpus
from retriever.errors import RetrieverError
from retriever.indexing.builder import build_index
from retriever.indexing.options import BuildOptions
from retriever.interfaces import Searcher
from retriever.options import WEB_SEARCHES, given_build, is_collection, read_token, select
from retriever.search.backends.collection import Collection, CollectionOptions
from retriever.search.backends.web import Budget, WebSearch
from retriever.search.index import Index
from retriever.search.index_memory import available_cores
from retriever.search.manifest import is_index, read_manifest
from retriever.search.opening import IndexOptions, open_index
from retriever.search.rerank import Reranker
from retriever.service.cache import ResultCache
from retriever.service.engine import Depths, Limits
from retriever.service.web.app import make_app

Report = Callable[[str], None]  # told what is being done


def load(arguments: argparse.Namespace, report: Report = lambda _: None) -> FastAPI:
    """The application over what the options name.

    Raises:
        RetrieverError: something is missing, damaged, too large, or does not belong together.
    """
    token = read_token(arguments)
    if arguments.host not in ("127.0.0.1", "localhost", "::1") and not token:
        sys.stderr.write(f"warning: {arguments.host} is open to the network without --token_file\n")
    searcher: Searcher
    if arguments.retriever_name in WEB_SEARCHES:
        budget = Budget(Path(f"{arguments.cache_path}.budget"), arguments.web_budget)
        searcher = WebSearch(arguments.retriever_name, budget, arguments.web_endpoint)
    elif is_collection(arguments):
        report(f"opening the collection {arguments.qdrant_collection}")
        searcher = Collection(select(CollectionOptions, arguments))
    else:
        searcher = load_index(arguments, report)
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
        Depths(arguments.retrieval_topk, arguments.reranking_topk),
        reranker=reranker,
        cache=cache,
        pages=pages,
        limits=Limits(
            arguments.max_batch,
            arguments.max_queue,
            arguments.max_queries,
            arguments.max_results,
            request_seconds=arguments.request_seconds,
            workers=_workers(arguments, searcher),
        ),
        token=token,
    )


def _workers(arguments: argparse.Namespace, searcher: Searcher) -> int:
    """Searches at once: one a core, but one for the web, where equal queries are to be paid for once."""
    if isinstance(searcher, WebSearch):
        return 1
    return arguments.threads or max(1, available_cores() // int(os.environ.get("OMP_NUM_THREADS") or 1))


def load_index(arguments: argparse.Namespace, report: Report) -> Index:
    """The corpus and its index, which is built first if it is missing and may be built.

    Raises:
        RetrieverError: as `load_corpus`, `build_index` and `open_index`.
    """
    report(f"reading the corpus {arguments.corpus_path}")
    corpus = load_corpus(arguments.corpus_path)
    if arguments.build_if_missing:
        name, model = arguments.retriever_name or BuildOptions.retriever_name, arguments.retriever_model
        options = BuildOptions(name, model, **given_build(arguments))
        if not is_index(arguments.index_path):
            report(f"building the index {arguments.index_path} over {len(corpus):,} passages")
            build_index(corpus, arguments.index_path, options)
        elif arguments.index_path.is_dir():
            _check_same(arguments, read_manifest(arguments.index_path))
    report(f"loading the index {arguments.index_path} over {len(corpus):,} passages")
    return open_index(arguments.index_path, corpus, select(IndexOptions, arguments))


def _check_same(arguments: argparse.Namespace, manifest: dict[str, Any]) -> None:
    """An index that is there must be the one that the options would build."""
    for name in ("kind", "factory"):
        asked, built = getattr(arguments, name), manifest.get(name, "faiss")
        if asked is not None and asked != built:
            raise RetrieverError(
                f"--{name} {asked}: {arguments.index_path} was built with {built}; leave the option out, or"
                " choose another --index_path"
            )
