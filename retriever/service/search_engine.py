"""Answers requests: cuts queries, looks them up in the store, searches them in batches, reranks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fastapi.concurrency import run_in_threadpool

from retriever.encoders.reranker import Reranker
from retriever.errors import RequestFailed, RetrieverError
from retriever.interfaces import Hits, Searcher
from retriever.service.batcher import SearchBatcher
from retriever.service.cache import ResultCache
from retriever.service.limits import Limits
from retriever.service.metrics import Metrics
from retriever.service.schemas import RetrieveRequest

# Characters of a query; what comes after them is cut off.
MAX_QUERY_LENGTH = 8192


class Engine:
    """Index, result store and reranker behind one call.

    Args:
        searcher: Answers the queries.
        topk: Documents to retrieve for each query of a request that does not say.
        rerank_topk: Documents to keep after reranking for each query of a request that does not say.
        limits: Sizes of requests, batches and the queue.
        metrics: Counts what is done.
        reranker: Orders the documents of CalibAdv's requests; None for no reranking.
        cache: The result store; None for none.
    """

    def __init__(
        self,
        searcher: Searcher,
        topk: int,
        rerank_topk: int,
        limits: Limits,
        metrics: Metrics,
        reranker: Reranker | None = None,
        cache: ResultCache | None = None,
    ):
        self._topk = topk
        self._rerank_topk = rerank_topk
        self._metrics = metrics
        self._reranker = reranker
        self._cache = cache
        # One thread: torch keeps buffers for each thread that calls it.
        self._rerank_thread = ThreadPoolExecutor(1, "rerank")
        # A request that the queue can never hold is refused at once: 503 would ask the client to come back.
        self._max_queries = min(limits.max_queries, limits.max_queue)
        self._max_results = limits.max_results
        self._batcher = SearchBatcher(searcher.search, limits, metrics.batch.observe)
        # Whether it was said already that results cannot be stored.
        self._has_warned = False
        metrics.queue.set_function(lambda: self._batcher.queued)

    async def answer(self, request: RetrieveRequest) -> list[Hits]:
        """Return the documents of each query.

        Args:
            request: The queries and how many documents are asked for.

        Returns:
            For each query its documents with scores, best first; scores of the reranker if it was used.

        Raises:
            RequestFailed: 422 if the request is too large or needs a reranker that is not loaded, 503 if too
                many queries wait, or the status of a query that failed.
            RetrieverError: The index failed.
        """
        asked_depth = request.topk_retrieval if request.is_calibadv else request.topk
        depth = asked_depth or self._topk
        self._check(request, depth)
        num_cut = sum(len(query) > MAX_QUERY_LENGTH for query in request.queries)
        self._metrics.cut.inc(num_cut)
        queries = [query[:MAX_QUERY_LENGTH] for query in request.queries]
        hits = await self._search_or_look_up(queries, depth)
        if not request.is_calibadv:
            return hits
        keep = request.topk_rerank or self._rerank_topk
        if request.not_sort:  # as the authors' server: no reranking, and the first ones are kept
            return [hits_of_query[:keep] for hits_of_query in hits]
        if self._reranker is None:
            return hits
        self._metrics.reranked.inc(len(queries))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._rerank_thread, self._reranker.rerank, queries, hits, keep)

    def _check(self, request: RetrieveRequest, depth: int) -> None:
        """Raise RequestFailed if a request is too large, or needs a reranker that is not loaded."""
        count = len(request.queries)
        if count > self._max_queries:
            raise RequestFailed(
                422,
                f"queries: {count} in one request, and {self._max_queries} are taken; raise --max_queries,"
                " --max_queue",
            )
        if count * depth > self._max_results:
            fitting = self._max_results // depth
            smaller = f"at most {fitting} queries at once" if fitting else f"topk {self._max_results} at most"
            raise RequestFailed(
                422,
                f"queries: {count} with {depth} documents each are {count * depth:,}, and"
                f" {self._max_results:,} are taken; send {smaller}, or raise --max_results",
            )
        needs_reranker = request.topk_rerank is not None and not request.not_sort
        if needs_reranker and self._reranker is None:
            raise RequestFailed(
                422, "topk_rerank: no reranker is loaded; leave it out, or start with --reranker_model"
            )

    async def _search_or_look_up(self, queries: list[str], k: int) -> list[Hits]:
        """Return the rows of each query, from the store if it has them."""
        if self._cache is None:
            return _raise_errors(await self._batcher.submit(queries, k))
        hits = await run_in_threadpool(self._cache.look_up, queries, k)
        missing = [number for number, stored in enumerate(hits) if stored is None]
        self._metrics.cached.inc(len(hits) - len(missing))
        if missing:
            missing_queries = [queries[number] for number in missing]
            outcomes = await self._batcher.submit(missing_queries, k)
            # Results are stored even if another query failed: they may have been paid for.
            fresh: dict[str, Hits] = {}
            for query, outcome in zip(missing_queries, outcomes, strict=True):
                if not isinstance(outcome, BaseException):
                    fresh[query] = outcome
            await run_in_threadpool(self._store, self._cache, fresh, k)
            for number, outcome in zip(missing, _raise_errors(outcomes), strict=True):
                hits[number] = outcome
        return [hits_of_query for hits_of_query in hits if hits_of_query is not None]

    def _store(self, cache: ResultCache, fresh: Mapping[str, Hits], k: int) -> None:
        """Store results; on a full disk the client still gets its answer, which is counted and said once."""
        try:
            cache.store(list(fresh), k, list(fresh.values()))
            self._has_warned = False
        except RetrieverError as error:
            self._metrics.unstored.inc(len(fresh))
            if not self._has_warned:
                sys.stderr.write(f"warning: {error}; searches are answered without it\n")
            self._has_warned = True


def _raise_errors(outcomes: Sequence[Hits | BaseException]) -> list[Hits]:
    """Return the rows of all queries, or raise the first error."""
    hits = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        hits.append(outcome)
    return hits
