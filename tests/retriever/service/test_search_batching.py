"""Queries that wait together share a search and get their own results."""

import asyncio
import ctypes
import os
import threading
import time
from functools import partial

import pytest
from retriever_rig import NAMES, Counting

from benchmarks.retrieval.load import process_bytes
from retriever.errors import RequestFailed
from retriever.service.engine import Limits, SearchBatcher, trim_memory


def test_waiting_queries_share_a_search(index):
    counting = Counting(index, seconds=0.02)

    async def run():
        batcher = SearchBatcher(counting.search, Limits(max_batch=64))
        return await asyncio.gather(*(batcher.submit([name], 3) for name in NAMES * 4))

    results = asyncio.run(run())
    for (matches,), name in zip(results, NAMES * 4, strict=True):
        (alone,) = index.search([name], 3)
        assert [row for row, _ in matches] == [row for row, _ in alone]
        # FAISS multiplies many queries by another kernel, which rounds otherwise.
        assert [score for _, score in matches] == pytest.approx([score for _, score in alone], rel=1e-5)
    assert len(counting.batches) <= 3, counting.batches


def test_single_requests_do_not_wait():
    batches = []

    def search(queries, k):
        batches.append(len(queries))
        return [[({"id": query}, 1.0)] for query in queries]

    async def run():
        batcher = SearchBatcher(search, Limits(max_wait=600.0))
        for _ in range(3):
            await asyncio.wait_for(batcher.submit(["ada", "bo"], 1), 10)
        await asyncio.gather(batcher.submit(["ada"], 1), batcher.submit(["bo"], 1))
        with pytest.raises(TimeoutError):  # two have come together: the next one waits for another
            await asyncio.wait_for(batcher.submit(["ada"], 1), 0.01)

    asyncio.run(run())
    assert batches == [2, 2, 2, 2]


def test_depths_are_not_mixed(index):
    counting = Counting(index)

    async def run():
        batcher = SearchBatcher(counting.search, Limits())
        return await asyncio.gather(batcher.submit(["lives"], 2), batcher.submit(["lives", "bo"], 3))

    item, two = asyncio.run(run())
    assert [len(matches) for matches in item + two] == [2, 3, 3]
    assert counting.batches == [(1, 2), (2, 3)]


def test_error_of_a_search_reaches_its_callers(index):
    def search(queries, k):
        if "bad" in queries:
            raise OSError("disk")
        return index.search(queries, k)

    async def run():
        batcher = SearchBatcher(search, Limits())
        (failed,) = await batcher.submit(["bad"], 1)
        assert isinstance(failed, OSError) and str(failed) == "disk"
        return await batcher.submit(["ada almson"], 1)

    assert asyncio.run(run())[0][0][0]["id"] == "0"


def test_query_of_absent_client_is_dropped(index):
    """While it waits; where it is searched already, the others of its search have their results."""
    counting = Counting(index, seconds=0.05)

    async def run():
        batcher = SearchBatcher(counting.search, Limits(max_batch=2))
        tasks = [asyncio.create_task(batcher.submit([name], 1)) for name in ("ada", "bo", "cy", "di")]
        await asyncio.sleep(0.02)
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.wait_for(asyncio.gather(tasks[1], tasks[3]), 10)

    asyncio.run(run())
    assert counting.batches == [(2, 1), (1, 1)]


def together(index, workers, *bursts):
    """Searches under way at once and sizes of all, for bursts of queries 10 ms apart."""
    lock, under_way, most, sizes = threading.Lock(), 0, 0, []

    def search(queries, k):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
            sizes.append(len(queries))
        time.sleep(0.1)
        with lock:
            under_way -= 1
        return index.search(queries, k)

    async def run():
        batcher = SearchBatcher(search, Limits(workers=workers, max_batch=32))
        tasks = []
        for burst in bursts:
            names = [NAMES[n % len(NAMES)] for n in range(burst)]
            tasks += [(name, asyncio.create_task(batcher.submit([name], 1))) for name in names]
            await asyncio.sleep(0.01)
        for name, task in tasks:
            ((matches,),) = await task
            assert name in matches[0]["contents"]

    asyncio.run(run())
    return most, sizes


@pytest.mark.parametrize(
    ("workers", "bursts", "most", "sizes"),
    [
        (1, (64,), 1, [32, 32]),
        (1, (32,), 1, [32]),
        (2, (64,), 2, [32, 32]),
        (4, (64,), 4, [16] * 4),
        (4, (10,), 1, [10]),  # not worth two
        (4, (1, 7), 1, [1, 7]),  # seven wait for the one under way
        (4, (1, 8), 2, [1, 8]),  # eight do not
        (2, (1, 8, 8), 2, [1, 8, 8]),
    ],
)
def test_further_searches_begin_where_enough_queries_wait(index, workers, bursts, most, sizes):
    assert together(index, workers, *bursts) == (most, sizes)


def test_request_above_the_queue_is_refused_whole():
    async def work():
        batcher = SearchBatcher(lambda queries, k: [[({"id": q}, 1.0)] for q in queries], Limits(max_queue=5))
        first = asyncio.ensure_future(batcher.submit(["a", "b", "c"], 1))
        await asyncio.sleep(0)
        assert batcher.queued == 3
        with pytest.raises(RequestFailed):
            await batcher.submit(["d", "e", "f"], 1)
        assert batcher.queued == 3
        second = await batcher.submit(["d", "e"], 1)  # exactly full
        assert batcher.queued == 0
        return [matches[0][0]["id"] for matches in [*await first, *second]]

    assert asyncio.run(work()) == ["a", "b", "c", "d", "e"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_memory_is_returned():
    blocks = [b"x" * size for size in range(20_000, 24_000)]  # 88 MB, each too small for a mapping of its own
    own_bytes = partial(process_bytes, os.getpid(), "RssAnon")
    full = own_bytes()
    pins = blocks[::50]
    del blocks
    trim_memory()
    assert own_bytes() < full - 40e6
    assert all(set(pin) == {120} for pin in pins)


def test_memory_is_trimmed_every_1000_queries(monkeypatch):
    trims = []
    monkeypatch.setattr("retriever.service.engine.trim_memory", lambda: trims.append(1))

    def search(queries, k):
        if k > 1:
            raise ValueError
        return [[]] * len(queries)

    async def run():
        batcher = SearchBatcher(search, Limits(max_batch=1000))
        for count, k, expected in ((300, 1, 0), (600, 1, 0), (300, 2, 1), (999, 1, 1), (1, 1, 2)):
            await batcher.submit(["a"] * count, k)
            while batcher._searches:
                await asyncio.sleep(0)
            assert len(trims) == expected

    asyncio.run(run())
