"""A request's way through the service: cut, looked up in the store, searched in a batch, reranked."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastapi.concurrency import run_in_threadpool

from retriever.errors import RetrieverError
from retriever.interfaces import Found, Searcher
from retriever.search.rerank import Reranker
from retriever.service.batching import SearchBatcher
from retriever.service.cache import ResultCache
from retriever.service.memory import trimmed
from retriever.service.metrics import Metrics
from retriever.service.web.contracts import MAX_QUERY_LENGTH, RetrieveRequest


@dataclass(frozen=True)
class Limits:
    """Limits of one service."""

    max_batch: int = 256  # queries of one search
    max_queue: int = 8192  # queries that wait; then 503
    max_queries: int = 8192  # queries of one request; then 422
    max_results: int = 2**16  # queries of one request times documents looked up for each; then 422
    max_wait: float = 0.002  # seconds a search waits for others to join
    workers: int = 1  # searches at the same time
    max_body: int = 16 * 2**20  # bytes of a request; then 413
    max_bodies: int = 2**27  # bytes of all requests under way; then 503
    request_seconds: float = 30.0  # that a client may take to send a request's body; then 408


@dataclass(frozen=True)
class Depths:
    """Documents per query if a request does not say."""

    topk: int
    rerank_topk: int = 3  # that the reranker keeps


class Refused(Exception):
    """A request that this service does not take, and how to change it."""


class Engine:
    """Index, result store and reranker behind one call."""

    def __init__(
        self,
        searcher: Searcher,
        depths: Depths,
        limits: Limits,
        metrics: Metrics,
        reranker: Reranker | None = None,
        cache: ResultCache | None = None,
    ):
        self._depths, self._metrics, self._reranker, self._cache = depths, metrics, reranker, cache
        # One thread: torch keeps buffers for each thread that calls it.
        self._rerank_thread = ThreadPoolExecutor(1, "rerank")
        # A request that the queue can never hold would be told to come back later for ever.
        self._max_queries = min(limits.max_queries, limits.max_queue)
        self._max_results = limits.max_results
        self._batcher = SearchBatcher(
            trimmed(searcher.search),
            limits.max_batch,
            limits.max_queue,
            limits.max_wait,
            metrics.batch.observe,
            limits.workers,
        )
        self._has_warned = False  # that results cannot be stored
        metrics.queue.set_function(lambda: self._batcher.queued)

    async def answer(self, request: RetrieveRequest) -> list[Found]:
        """Each query's documents, as many and in such an order as the request asks for.

        Raises:
            Refused, Overloaded, NotRecorded, or why a query was not answered.
        """
        if len(request.queries) > self._max_queries:
            raise Refused(
                f"queries: {len(request.queries)} in one request, and {self._max_queries} are taken; send"
                " fewer at once, or start with a larger --max_queries and --max_queue"
            )
        depth = request.depth(self._depths.topk)
        self._check_results(len(request.queries), depth)
        needs_reranker = request.topk_rerank is not None and not request.not_sort
        if needs_reranker and self._reranker is None:
            raise Refused("topk_rerank: no reranker is loaded; leave it out, or start with --reranker_model")
        queries = self._cut(request.queries)
        found = await self._find(queries, depth)
        if not request.is_calibadv:
            return found
        keep = request.topk_rerank or self._depths.rerank_topk
        if request.not_sort:  # as the authors' server: no reranking, not only no new order
            return [one[:keep] for one in found]
        if self._reranker is None:
            return found
        self._metrics.reranked.inc(len(queries))
        rerank = self._reranker.rerank
        return await asyncio.get_running_loop().run_in_executor(
            self._rerank_thread, rerank, queries, found, keep
        )

    def _check_results(self, queries: int, depth: int) -> None:
        """All that is found for a request is in memory at once."""
        if queries * depth <= self._max_results:
            return
        fitting = self._max_results // depth
        smaller = f"at most {fitting} queries at once" if fitting else f"topk {self._max_results} at most"
        raise Refused(
            f"queries: {queries} with {depth} documents each are {queries * depth:,}, and"
            f" {self._max_results:,} are taken; send {smaller}, or start with a larger --max_results"
        )

    def _cut(self, queries: Sequence[str]) -> list[str]:
        """One overlong query must not cost the others of its request their answers."""
        self._metrics.cut.inc(sum(len(query) > MAX_QUERY_LENGTH for query in queries))
        return [query[:MAX_QUERY_LENGTH] for query in queries]

    async def _find(self, queries: list[str], k: int) -> list[Found]:
        """The k best rows of each query, from the store if they are known."""
        if self._cache is None:
            return _all_found(await self._batcher.submit(queries, k))
        known = await run_in_threadpool(self._cache.look_up, queries, k)
        missing = [number for number, found in enumerate(known) if found is None]
        self._metrics.cached.inc(len(known) - len(missing))
        if missing:
            asked = [queries[number] for number in missing]
            outcomes = await self._batcher.submit(asked, k)
            # What was found is kept even if another query failed: it may have been paid for.
            fresh = {
                query: one
                for query, one in zip(asked, outcomes, strict=True)
                if not isinstance(one, BaseException)
            }
            await run_in_threadpool(self._keep, self._cache, fresh, k)
            for number, one in zip(missing, _all_found(outcomes), strict=True):
                known[number] = one
        return [one for one in known if one is not None]

    def _keep(self, cache: ResultCache, fresh: Mapping[str, Found], k: int) -> None:
        """Stores results. A full disk costs no client its answer: it is counted, and said once."""
        try:
            cache.store(list(fresh), k, list(fresh.values()))
            self._has_warned = False
        except RetrieverError as error:
            self._metrics.unstored.inc(len(fresh))
            if not self._has_warned:
                sys.stderr.write(f"warning: {error}; searches are answered without it\n")
            self._has_warned = True


def _all_found(outcomes: Sequence[Found | BaseException]) -> list[Found]:
    found = []
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found
