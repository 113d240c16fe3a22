"""Searches for many clients at once: queries that wait together share one search."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from retriever.interfaces import Found

Search = Callable[[Sequence[str], int], Sequence[Found | Exception]]


WORTH_IT = 8  # queries for which a further search begins beside those under way


class Overloaded(Exception):
    """More queries wait than the queue may hold."""


@dataclass
class _Waiting:
    query: str
    k: int
    request: int  # its number
    future: asyncio.Future[Found]


class SearchBatcher:
    """Searches in threads; what arrives while they are under way forms the next ones.

    Args:
        search: (queries, k) -> the k best of each, or why that query has none; releases the GIL for its
            heavy part. With more than one worker, several threads call it at once.
        max_batch: queries of one search.
        max_queue: queries that may wait; more are refused.
        max_wait: seconds a search waits for other requests to join. It does not wait if the last one was of
            a single request: a client that sends one request at a time would wait for nobody.
        on_batch: called with the number of queries of every search.
        workers: searches at the same time. A second one begins only when WORTH_IT queries wait: a small
            batch costs several times as much computation a query as a large one.
    """

    def __init__(
        self,
        search: Search,
        max_batch: int = 256,
        max_queue: int = 8192,
        max_wait: float = 0.002,
        on_batch: Callable[[int], object] = lambda _: None,
        workers: int = 1,
    ):
        self._search, self._on_batch = search, on_batch
        self.max_batch, self.max_queue, self.max_wait, self.workers = max_batch, max_queue, max_wait, workers
        self._queue: deque[_Waiting] = deque()
        self._requests = 0  # so far
        self._is_shared = False  # whether the last search was of several requests
        self._timer: asyncio.TimerHandle | None = None  # of the next searches
        self._searches: set[asyncio.Task[None]] = set()
        # Always the same threads: torch and OpenMP keep buffers and workers for each calling thread.
        self._threads = ThreadPoolExecutor(workers, "search")

    @property
    def queued(self) -> int:
        """Queries that wait for their search to begin."""
        return len(self._queue)

    async def submit(self, queries: Sequence[str], k: int) -> list[Found | BaseException]:
        """The k best rows of each query, best first, or why that query has none.

        Raises:
            Overloaded: the queue is full; nothing of the request was queued.
        """
        if self.queued + len(queries) > self.max_queue:
            raise Overloaded
        loop = asyncio.get_running_loop()
        self._requests += 1
        waiting = [_Waiting(query, k, self._requests, loop.create_future()) for query in queries]
        self._queue += waiting
        self._schedule()
        # Cancelled if the client has left, it cancels the futures: those not yet searched are dropped.
        return list(await asyncio.gather(*(one.future for one in waiting), return_exceptions=True))

    def _schedule(self) -> None:
        """Begins searches soon, if one may begin: others may join until then."""
        if self._timer is None and self._may_begin():
            wait = self.max_wait if self._is_shared and len(self._queue) < self.max_batch else 0.0
            self._timer = asyncio.get_running_loop().call_later(wait, self._begin)

    def _may_begin(self) -> bool:
        if not self._searches:
            return bool(self._queue)
        return len(self._searches) < self.workers and len(self._queue) >= WORTH_IT

    def _begin(self) -> None:
        self._timer = None
        while self._may_begin():
            searches = max(1, min(self.workers - len(self._searches), len(self._queue) // WORTH_IT))
            batch = self._next_batch(min(self.max_batch, -(-len(self._queue) // searches)))
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
        queries = [one.query for one in batch]
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._search, queries, batch[0].k)
        except Exception as error:  # handed to every caller; the next batch is searched nevertheless
            for one in batch:
                if not one.future.done():
                    one.future.set_exception(error)
            return
        for one, result in zip(batch, found, strict=True):
            if one.future.done():
                continue
            if isinstance(result, Exception):
                one.future.set_exception(result)
            else:
                one.future.set_result(result)

    def _next_batch(self, size: int) -> list[_Waiting]:
        """At most `size` of the longest-waiting queries that ask for the same k.

        Those whose client has gone are dropped. One k a search: an approximate index may rank the first five
        of ten differently from five of five.
        """
        batch: list[_Waiting] = []
        while self._queue and len(batch) < size:
            if self._queue[0].future.done():
                self._queue.popleft()
            elif batch and self._queue[0].k != batch[0].k:
                break
            else:
                batch.append(self._queue.popleft())
        return batch
