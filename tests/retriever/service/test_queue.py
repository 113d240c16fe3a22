"""How many queries may wait: those of a request count together, and wait all or none."""

import asyncio

import pytest

from retriever.service.engine import Overloaded, SearchBatcher


def test_a_request_that_does_not_fit_beside_those_that_wait_is_refused_whole():
    async def work():
        batcher = SearchBatcher(lambda queries, k: [[({"id": q}, 1.0)] for q in queries], max_queue=5)
        first = asyncio.ensure_future(batcher.submit(["a", "b", "c"], 1))
        await asyncio.sleep(0)
        assert batcher.queued == 3
        with pytest.raises(Overloaded):
            await batcher.submit(["d", "e", "f"], 1)
        assert batcher.queued == 3
        second = await batcher.submit(["d", "e"], 1)  # exactly full
        return [found[0][0]["id"] for found in [*await first, *second]]

    assert asyncio.run(work()) == ["a", "b", "c", "d", "e"]
