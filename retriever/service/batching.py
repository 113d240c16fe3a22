"""Searches for many clients at once: queries that wait together share one search."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from retriever.protocol import Found

Search = Callable[[Sequence[str], int], Sequence[Found | Exception]]


class Overloaded(Exception):
    """More queries wait than the queue may hold."""


@dataclass
class _Waiting:
    query: str
    k: int
    future: asyncio.Future[Found]


class SearchBatcher:
    """One search at a time, in a thread; what arrives meanwhile forms the next one.

    Args:
        search: (queries, k) -> the k best of each, or why that query has none; releases the GIL for its
            heavy part.
        max_batch: queries of one search.
        max_queue: queries that may wait; more are refused.
        max_wait: seconds a search waits for others to join.
        on_batch: called with the number of queries of every search.
    """

    def __init__(
        self,
        search: Search,
        max_batch: int = 256,
        max_queue: int = 8192,
        max_wait: float = 0.002,
        on_batch: Callable[[int], object] = lambda _: None,
    ):
        self._search, self._on_batch = search, on_batch
        self.max_batch, self.max_queue, self.max_wait = max_batch, max_queue, max_wait
        self._queue: deque[_Waiting] = deque()
        self._worker: asyncio.Task[None] | None = None
        # Always the same thread: torch and OpenMP keep buffers and workers for each calling thread.
        self._thread = ThreadPoolExecutor(1, "search")

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
        waiting = [_Waiting(query, k, loop.create_future()) for query in queries]
        self._queue += waiting
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        try:
            return list(await asyncio.gather(*(one.future for one in waiting), return_exceptions=True))
        except BaseException:
            for one in waiting:
                one.future.cancel()
            raise

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            if len(self._queue) < self.max_batch:
                await asyncio.sleep(self.max_wait)
            batch = self._next_batch()
            if not batch:
                continue
            self._on_batch(len(batch))
            try:
                queries = [one.query for one in batch]
                found = await loop.run_in_executor(self._thread, self._search, queries, batch[0].k)
            except Exception as error:  # handed to every caller; the next batch is searched nevertheless
                for one in batch:
                    if not one.future.done():
                        one.future.set_exception(error)
                continue
            for one, result in zip(batch, found, strict=True):
                if one.future.done():
                    continue
                if isinstance(result, Exception):
                    one.future.set_exception(result)
                else:
                    one.future.set_result(result)

    def _next_batch(self) -> list[_Waiting]:
        """The longest-waiting queries that ask for the same k; those whose client has gone are dropped.

        One k a search: an approximate index may rank the first five of ten differently from five of five.
        """
        batch: list[_Waiting] = []
        while self._queue and len(batch) < self.max_batch:
            if self._queue[0].future.done():
                self._queue.popleft()
            elif batch and self._queue[0].k != batch[0].k:
                break
            else:
                batch.append(self._queue.popleft())
        return batch
