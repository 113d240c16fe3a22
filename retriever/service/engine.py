"""Answers requests: cuts queries, looks them up in the store, searches them in batches, reranks."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import BaseModel, ConfigDict, FailFast, Field

from retriever.encoders.reranker import Reranker
from retriever.errors import RequestFailed, RetrieverError
from retriever.interfaces import Hits, Searcher
from retriever.service.cache import ResultCache

MAX_QUERY_LENGTH = 8192  # characters; what comes after them is cut off
MAX_TOPK = 1000
MAX_URLS = 256


class RetrieveRequest(BaseModel):
    """A request of any of the three contracts."""

    model_config = ConfigDict(extra="forbid")

    queries: Annotated[list[str], FailFast()]  # one error, not one for each of a million items
    topk: int | None = Field(None, ge=1, le=MAX_TOPK)
    return_scores: bool = False
    topk_retrieval: int | None = Field(None, ge=1, le=MAX_TOPK)
    topk_rerank: int | None = Field(None, ge=1, le=MAX_TOPK)
    not_sort: bool = False

    @property
    def is_calibadv(self) -> bool:
        return self.topk_retrieval is not None or self.topk_rerank is not None


class AccessRequest(BaseModel):
    """RLinf's page access."""

    model_config = ConfigDict(extra="forbid")

    urls: Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_URLS)]


BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TRIM_EVERY = 1000  # queries; a trim takes about 10 ms, a thousand queries of a small encoder 3 s
MIN_BATCH = 8  # queries for which a further search begins beside those under way

SearchFunction = Callable[[Sequence[str], int], Sequence[Hits | Exception]]


class Metrics:
    """Prometheus metrics in their own registry: one process may hold several services."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        count, measure = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.requests = count("retriever_requests", "Requests", ["route", "status"])
        self.seconds = measure("retriever_request_seconds", "Time to answer", ["route"])
        self.batch = measure("retriever_batch_queries", "Queries of a search", buckets=BATCH_SIZES)
        self.queue = Gauge("retriever_queued_queries", "Queries that wait", registry=registry)
        self.cached = count("retriever_cached_queries", "Answered from the store")
        self.unstored = count("retriever_unstored_queries", "Answered, but the store took no result")
        self.cut = count("retriever_cut_queries", "Longer than the limit, and cut to it")
        self.reranked = count("retriever_reranked_queries", "Reranked")


def trim_memory() -> None:
    """Return freed memory to the system; no effect without glibc.

    glibc keeps the holes of temporaries of many sizes: 100 to 200 MB in ten minutes of 64 clients.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


@dataclass(frozen=True)
class Limits:
    max_batch: int = 256  # queries of one search
    max_queue: int = 8192  # queries that wait; then 503
    max_queries: int = 8192  # queries of one request; then 422
    max_results: int = 2**16  # queries of one request times documents looked up for each; then 422
    max_wait: float = 0.002  # seconds a search waits for others to join
    workers: int = 1  # searches at the same time
    max_body: int = 16 * 2**20  # bytes of a request; then 413
    max_bodies: int = 2**27  # bytes of all requests under way; then 503
    request_seconds: float = 30.0  # that a client may take to send a request's body; then 408


@dataclass
class _Waiting:
    query: str
    k: int
    request: int  # its number
    future: asyncio.Future[Hits]


class SearchBatcher:
    """Searches in threads; queries that arrive meanwhile share the next searches.

    `on_batch` is called with the number of queries of every search. A search waits `max_wait` seconds for
    other requests, unless the last one had a single request. A further search begins when MIN_BATCH queries
    wait: a query of a small batch costs several times one of a large batch.
    """

    def __init__(
        self, search: SearchFunction, limits: Limits, on_batch: Callable[[int], object] = lambda _: None
    ):
        self._search, self._limits, self._on_batch = search, limits, on_batch
        self._queue: deque[_Waiting] = deque()
        self._requests = 0  # so far
        self._untrimmed = 0  # queries since the last `trim_memory`
        self._is_shared = False  # whether the last search was of several requests
        self._timer: asyncio.TimerHandle | None = None  # of the next searches
        self._searches: set[asyncio.Task[None]] = set()
        # Always the same threads: torch and OpenMP keep buffers and workers for each calling thread.
        self._threads = ThreadPoolExecutor(limits.workers, "search")

    @property
    def queued(self) -> int:
        """Number of queries that wait for their search."""
        return len(self._queue)

    async def submit(self, queries: Sequence[str], k: int) -> list[Hits | BaseException]:
        """Return the k best rows of each query or its error.

        Raises RequestFailed (503) if the queue cannot hold all of them; none is queued then.
        """
        if self.queued + len(queries) > self._limits.max_queue:
            raise RequestFailed(503, "too many queries wait; try again later, or start more services")
        loop = asyncio.get_running_loop()
        self._requests += 1
        waiting = [_Waiting(query, k, self._requests, loop.create_future()) for query in queries]
        self._queue += waiting
        self._schedule()
        # If the client has left, this is cancelled and cancels the futures: queued queries are dropped.
        return list(await asyncio.gather(*(query.future for query in waiting), return_exceptions=True))

    def _schedule(self) -> None:
        if self._timer is None and self._may_begin():
            may_wait = self._is_shared and len(self._queue) < self._limits.max_batch
            wait = self._limits.max_wait if may_wait else 0.0
            self._timer = asyncio.get_running_loop().call_later(wait, self._begin)

    def _may_begin(self) -> bool:
        if not self._searches:
            return bool(self._queue)
        return len(self._searches) < self._limits.workers and len(self._queue) >= MIN_BATCH

    def _begin(self) -> None:
        self._timer = None
        while self._may_begin():
            searches = max(1, min(self._limits.workers - len(self._searches), len(self._queue) // MIN_BATCH))
            batch = self._next_batch(min(self._limits.max_batch, -(-len(self._queue) // searches)))
            if batch:
                search = asyncio.get_running_loop().create_task(self._run(batch))
                self._searches.add(search)
                search.add_done_callback(self._end)

    def _end(self, search: asyncio.Task[None]) -> None:
        self._searches.discard(search)
        self._schedule()

    async def _run(self, batch: list[_Waiting]) -> None:
        self._on_batch(len(batch))
        self._is_shared = batch[0].request != batch[-1].request
        queries = [waiting.query for waiting in batch]
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._threads, self._search, queries, batch[0].k)
        except Exception as error:  # handed to every caller; the next batch is searched nevertheless
            results = [error] * len(batch)
        for waiting, result in zip(batch, results, strict=True):
            if waiting.future.done():
                continue
            if isinstance(result, Exception):
                waiting.future.set_exception(result)
            else:
                waiting.future.set_result(result)
        self._untrimmed += len(batch)
        if self._untrimmed >= TRIM_EVERY:
            self._untrimmed = 0
            await loop.run_in_executor(self._threads, trim_memory)

    def _next_batch(self, size: int) -> list[_Waiting]:
        """Return queued queries of one k: an approximate index may rank 5 of 10 differently from 5 of 5."""
        batch: list[_Waiting] = []
        while self._queue and len(batch) < size:
            if self._queue[0].future.done():
                self._queue.popleft()
            elif batch and self._queue[0].k != batch[0].k:
                break
            else:
                batch.append(self._queue.popleft())
        return batch


class Engine:
    """Index, result store and reranker behind one call.

    `topk` and `rerank_topk` are the documents for each query of a request that does not say.
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
        self._topk, self._rerank_topk = topk, rerank_topk
        self._metrics, self._reranker, self._cache = metrics, reranker, cache
        # One thread: torch keeps buffers for each thread that calls it.
        self._rerank_thread = ThreadPoolExecutor(1, "rerank")
        # A request that the queue can never hold would be told to come back later for ever.
        self._max_queries = min(limits.max_queries, limits.max_queue)
        self._max_results = limits.max_results
        self._batcher = SearchBatcher(searcher.search, limits, metrics.batch.observe)
        self._has_warned = False  # that results cannot be stored
        metrics.queue.set_function(lambda: self._batcher.queued)

    async def answer(self, request: RetrieveRequest) -> list[Hits]:
        """Return each query's documents; raises RequestFailed, or the error of a query."""
        count, limit = len(request.queries), self._max_queries
        if count > limit:
            problem = f"queries: {count} in one request, and {limit} are taken"
            raise RequestFailed(422, f"{problem}; raise --max_queries, --max_queue")
        depth = (request.topk_retrieval if request.is_calibadv else request.topk) or self._topk
        if count * depth > self._max_results:
            fitting = self._max_results // depth
            smaller = f"at most {fitting} queries at once" if fitting else f"topk {self._max_results} at most"
            problem = f"queries: {count} with {depth} documents each are {count * depth:,}"
            advice = f"{self._max_results:,} are taken; send {smaller}, or raise --max_results"
            raise RequestFailed(422, f"{problem}, and {advice}")
        needs_reranker = request.topk_rerank is not None and not request.not_sort
        if needs_reranker and self._reranker is None:
            problem = "topk_rerank: no reranker is loaded; leave it out, or start with --reranker_model"
            raise RequestFailed(422, problem)
        self._metrics.cut.inc(sum(len(query) > MAX_QUERY_LENGTH for query in request.queries))
        queries = [query[:MAX_QUERY_LENGTH] for query in request.queries]
        hits = await self._search_or_look_up(queries, depth)
        if not request.is_calibadv:
            return hits
        keep = request.topk_rerank or self._rerank_topk
        if request.not_sort:  # as the authors' server: no reranking, not only no new order
            return [hits_of_query[:keep] for hits_of_query in hits]
        if self._reranker is None:
            return hits
        self._metrics.reranked.inc(len(queries))
        loop, rerank = asyncio.get_running_loop(), self._reranker.rerank
        return await loop.run_in_executor(self._rerank_thread, rerank, queries, hits, keep)

    async def _search_or_look_up(self, queries: list[str], k: int) -> list[Hits]:
        if self._cache is None:
            return _raise_errors(await self._batcher.submit(queries, k))
        hits = await run_in_threadpool(self._cache.look_up, queries, k)
        missing = [number for number, stored in enumerate(hits) if stored is None]
        self._metrics.cached.inc(len(hits) - len(missing))
        if missing:
            searched = [queries[number] for number in missing]
            outcomes = await self._batcher.submit(searched, k)
            # Results are stored even if another query failed: they may have been paid for.
            pairs = zip(searched, outcomes, strict=True)
            fresh = {query: outcome for query, outcome in pairs if not isinstance(outcome, BaseException)}
            await run_in_threadpool(self._store, self._cache, fresh, k)
            for number, outcome in zip(missing, _raise_errors(outcomes), strict=True):
                hits[number] = outcome
        return [hits_of_query for hits_of_query in hits if hits_of_query is not None]

    def _store(self, cache: ResultCache, fresh: Mapping[str, Hits], k: int) -> None:
        """Store results; a full disk costs no client its answer: count it, and warn once."""
        try:
            cache.store(list(fresh), k, list(fresh.values()))
            self._has_warned = False
        except RetrieverError as error:
            self._metrics.unstored.inc(len(fresh))
            if not self._has_warned:
                sys.stderr.write(f"warning: {error}; searches are answered without it\n")
            self._has_warned = True


def _raise_errors(outcomes: Sequence[Hits | BaseException]) -> list[Hits]:
    hits = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        hits.append(outcome)
    return hits
