"""What two clients ask for at once is stored once, and the store goes on after it."""

import asyncio

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from retriever_rig import Counting

from retriever.service.cache import ResultCache
from retriever.service.engine import Depths, Engine, Limits, Metrics, RetrieveRequest

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


def test_a_full_disk_costs_no_client_its_answer(index, store, capsys):
    """SQLite's own error, by a limit of its own; it is said once, and again after it has worked."""
    engine_metrics = Metrics()
    engine = Engine(index, Depths(3), Limits(), engine_metrics, None, store)

    def unstored():
        return engine_metrics.registry.get_sample_value("retriever_unstored_queries_total")

    def ask(*queries):
        answers = asyncio.run(engine.answer(RetrieveRequest(queries=list(queries), topk=3)))
        assert answers == index.search(queries, 3)

    ask("ada almson")
    (pages,) = store._store.execute("PRAGMA page_count").fetchone()
    for outage in (1, 2):
        store._store.execute(f"PRAGMA max_page_count = {pages}")
        long = [f"bo dorn {outage} {n}" for n in range(40)]
        ask(*long)
        ask(*long)
        said = capsys.readouterr().err
        assert said.count("warning: ") == 1 and "results cannot be stored" in said and "full" in said
        assert unstored() == 80 * outage
        ask("ada almson")  # what was stored before is still found
        assert unstored() == 80 * outage
        store._store.execute("PRAGMA max_page_count = 1000000")
        ask("cy dorn" * outage)
        (pages,) = store._store.execute("PRAGMA page_count").fetchone()
    assert store.look_up(["cy dorn", "bo dorn 1 0"], 3) == [index.search(["cy dorn"], 3)[0], None]
