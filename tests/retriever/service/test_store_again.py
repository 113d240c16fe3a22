"""What two clients ask for at once is stored once, and the store goes on after it."""

import asyncio

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from retriever_rig import Counting

from retriever.service.cache import ResultCache
from retriever.service.contracts import RetrieveRequest
from retriever.service.engine import Depths, Engine, Limits
from retriever.service.metrics import Metrics

FIRST = [({"id": "1", "contents": "é"}, 0.5)]
SECOND = [({"id": "2", "contents": "b"}, 0.25)]


@pytest.fixture
def store(tmp_path):
    store = ResultCache(tmp_path / "store.sqlite", {"encoder": "x"}, "use")
    yield store
    store.close()


def test_what_was_stored_first_stays(store):
    store.store(["a"], 3, [FIRST])
    store.store(["b", "a"], 3, [SECOND, SECOND])
    assert store.look_up(["a", "b", "c"], 3) == [FIRST, SECOND, None]
    store.store(["c"], 3, [FIRST])  # nothing is left open
    assert store.look_up(["c"], 3) == [FIRST]


def test_a_later_process_finds_what_was_stored(store, tmp_path):
    store.store(["a"], 3, [FIRST])
    again = ResultCache(tmp_path / "store.sqlite", {"encoder": "x"}, "replay")
    assert again.look_up(["a"], 3) == [FIRST]
    again.close()


def test_clients_that_ask_the_same_at_once_are_all_answered(index, store):
    counting = Counting(index, seconds=0.05)
    engine = Engine(counting, Depths(3), Limits(max_batch=1, max_wait=0.0), Metrics(), None, store)
    request = RetrieveRequest(queries=["ada almson"], topk=3)

    async def ask():
        return await asyncio.gather(*(engine.answer(request) for _ in range(4)))

    answers = asyncio.run(asyncio.wait_for(ask(), 30))
    assert len(answers[0][0]) == 3 and all(answer == answers[0] for answer in answers)
    assert len(counting.batches) > 1  # they did ask at once
    assert store.look_up(["ada almson"], 3) == answers[0]
