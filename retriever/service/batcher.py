"""Searches queries in batches: those that arrive during a search share the next searches."""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from retriever.errors import RequestFailed
from retriever.interfaces import Hits
from retriever.service.limits import Limits

# Queries between two calls of `trim_memory`, which takes about 10 ms; a thousand queries of a small encoder
# take 3 s.
TRIM_EVERY = 1000
# Queries that wait when a further search begins beside those that run.
MIN_BATCH = 8

# The `search` of an `interfaces.Searcher`.
SearchFunction = Callable[[Sequence[str], int], Sequence[Hits | Exception]]


def trim_memory() -> None:
    """Return freed memory to the system; no effect without glibc.

    glibc keeps the holes of temporaries of many sizes: 100 to 200 MB in ten minutes of 64 clients.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


@dataclass
class _QueuedQuery:
    """A query that waits for its search.

    Attributes:
        query: Its text.
        k: Number of rows asked for.
        request: Number of the request that it belongs to.
        future: Gets its rows or its error.
    """

    query: str
    k: int
    request: int
    future: asyncio.Future[Hits]


def _ignore_batch(size: int) -> None:
    """Do nothing with the size of a search."""


class SearchBatcher:
    """Searches in threads; queries that arrive meanwhile share the next searches.

    A search waits `Limits.max_wait` seconds for other requests, unless the last one had a single request. A
    further search begins when MIN_BATCH queries wait: a query of a small batch costs several times one of a
    large batch.

    Args:
        search: Searches a batch; it is called by the batcher's own threads.
        limits: Sizes of batches and of the queue, and the number of threads.
        on_batch: Called with the number of queries of every search.
    """

    def __init__(
        self, search: SearchFunction, limits: Limits, on_batch: Callable[[int], object] = _ignore_batch
    ):
        self._search = search
        self._limits = limits
        self._on_batch = on_batch
        self._queue: deque[_QueuedQuery] = deque()
        self._num_requests = 0
        # Queries that were searched since the last `trim_memory`.
        self._untrimmed = 0
        # Whether the last search had queries of several requests.
        self._is_shared = False
        # Begins the next searches; None if none are due.
        self._timer: asyncio.TimerHandle | None = None
        self._searches: set[asyncio.Task[None]] = set()
        # Always the same threads: torch and OpenMP keep buffers and workers for each calling thread.
        self._threads = ThreadPoolExecutor(limits.workers, "search")

    @property
    def queued(self) -> int:
        """Number of queries that wait for their search."""
        return len(self._queue)

    async def submit(self, queries: Sequence[str], k: int) -> list[Hits | BaseException]:
        """Search queries together with those of other requests.

        Args:
            queries: The texts of one request.
            k: Largest number of rows for each query.

        Returns:
            For each query its best rows, or its error.

        Raises:
            RequestFailed: 503: the queue cannot hold all of them, and none is queued.
        """
        if self.queued + len(queries) > self._limits.max_queue:
            raise RequestFailed(503, "too many queries wait; try again later, or start more services")
        loop = asyncio.get_running_loop()
        self._num_requests += 1
        queued = [_QueuedQuery(query, k, self._num_requests, loop.create_future()) for query in queries]
        self._queue += queued
        self._schedule()
        # If the client has left, this is cancelled and cancels the futures: queued queries are dropped.
        futures = [query.future for query in queued]
        return list(await asyncio.gather(*futures, return_exceptions=True))

    def _schedule(self) -> None:
        """Start the timer of the next searches if they may begin."""
        if self._timer is None and self._may_begin():
            may_wait = self._is_shared and len(self._queue) < self._limits.max_batch
            seconds = self._limits.max_wait if may_wait else 0.0
            self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)

    def _may_begin(self) -> bool:
        """Return whether a further search is worth it."""
        if not self._searches:
            return bool(self._queue)
        has_free_worker = len(self._searches) < self._limits.workers
        return has_free_worker and len(self._queue) >= MIN_BATCH

    def _begin(self) -> None:
        """Begin searches, which divide the queue evenly."""
        self._timer = None
        while self._may_begin():
            free_workers = self._limits.workers - len(self._searches)
            num_searches = max(1, min(free_workers, len(self._queue) // MIN_BATCH))
            even_size = -(-len(self._queue) // num_searches)  # rounded up
            batch = self._next_batch(min(self._limits.max_batch, even_size))
            if batch:
                search = asyncio.get_running_loop().create_task(self._run(batch))
                self._searches.add(search)
                search.add_done_callback(self._end)

    def _end(self, search: asyncio.Task[None]) -> None:
        self._searches.discard(search)
        self._schedule()

    async def _run(self, batch: list[_QueuedQuery]) -> None:
        """Search a batch and hand each query its rows or its error."""
        self._on_batch(len(batch))
        self._is_shared = batch[0].request != batch[-1].request
        queries = [queued.query for queued in batch]
        loop = asyncio.get_running_loop()
        results: Sequence[Hits | Exception]
        try:
            results = await loop.run_in_executor(self._threads, self._search, queries, batch[0].k)
        except Exception as error:  # handed to every caller; the next batch is searched nevertheless
            results = [error] * len(batch)
        for queued, result in zip(batch, results, strict=True):
            if queued.future.done():
                continue
            if isinstance(result, Exception):
                queued.future.set_exception(result)
            else:
                queued.future.set_result(result)
        self._untrimmed += len(batch)
        if self._untrimmed >= TRIM_EVERY:
            self._untrimmed = 0
            await loop.run_in_executor(self._threads, trim_memory)

    def _next_batch(self, size: int) -> list[_QueuedQuery]:
        """Return queued queries of one k: an approximate index may rank 5 of 10 differently from 5 of 5."""
        batch: list[_QueuedQuery] = []
        while self._queue and len(batch) < size:
            first = self._queue[0]
            if first.future.done():  # its client has left
                self._queue.popleft()
            elif batch and first.k != batch[0].k:
                break
            else:
                batch.append(self._queue.popleft())
        return batch
