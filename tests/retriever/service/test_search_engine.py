"""Queries are looked up in the store, which repeats a run exactly, or share searches."""

import asyncio
import ctypes
import os
import sqlite3
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from fastapi.testclient import TestClient
from retriever_rig import NAMES, Counting, Held, refuses

from benchmarks.retrieval.load import process_bytes
from retriever.errors import RequestFailed
from retriever.service.app import make_app
from retriever.service.batcher import SearchBatcher, trim_memory
from retriever.service.cache import ResultCache
from retriever.service.limits import Limits
from retriever.service.metrics import Metrics
from retriever.service.schemas import RetrieveRequest
from retriever.service.search_engine import Engine

ECHO = SimpleNamespace(manifest={}, search=lambda queries, k: [[({"id": name}, 1.0)] for name in queries])


def item(name):
    return [({"id": name, "contents": f"text of {name}"}, 1.0)]


@pytest.fixture
def store(tmp_path):
    return ResultCache(tmp_path / "store.sqlite", {"encoder": "x"}, "use")


def test_store_repeats_a_run_and_names_a_miss(index, tmp_path):
    counting, path = Counting(index), tmp_path / "store.sqlite"
    body = {"queries": ["ada almson", "bo dorn"], "topk": 3, "return_scores": True}
    with TestClient(make_app(counting, 3, cache=ResultCache(path, index.manifest, "use"))) as client:
        first = client.post("/retrieve", json=body).json()
        assert client.post("/retrieve", json=body).json() == first
        assert "retriever_cached_queries_total 2.0" in client.get("/metrics").text
    with TestClient(make_app(counting, 3, cache=ResultCache(path, index.manifest, "replay"))) as client:
        assert client.post("/retrieve", json=body).json() == first
        missed = client.post("/retrieve", json=body | {"queries": ["cy carlson"]})
        assert missed.status_code == 409 and "'cy carlson' was not recorded" in missed.json()["error"]
        assert client.post("/retrieve", json=body | {"topk": 2}).status_code == 409
    assert sum(size for size, _ in counting.batches) == 2
    other = ResultCache(path, index.manifest | {"encoder": "other"}, "use")
    assert other.look_up(["ada almson"], 3) == [None]


def test_failed_insert_and_damaged_store_are_errors(store):
    """Unlike a full disk, most errors leave SQLite's transaction open: here one of the second row."""
    store._store.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON results WHEN NEW.found LIKE '%refused%'"
        " BEGIN SELECT RAISE(FAIL, 'not this one'); END"
    )
    rows = [item("a"), item("refused")]
    refuses("results cannot be stored .*not this one", store.store, ["a", "b"], 1, rows)
    assert store.look_up(["a", "b"], 1) == [None, None]
    store.store(["c"], 1, [item("c")])
    again = ResultCache(store.path, {"encoder": "x"}, "use")
    assert again.look_up(["c"], 1) == [item("c")]  # written, not only begun
    path = store.path.with_name("other")
    refuses("nothing was recorded here", ResultCache, path, {}, "replay")
    path.write_bytes(b"no database at all, but long enough to look like a file" * 50)
    refuses("not a result store", ResultCache, path, {}, "use")


def test_opening_waits_for_another_process(tmp_path):
    other = sqlite3.connect(tmp_path / "s", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, other.execute, ["COMMIT"]).start()
    store = ResultCache(tmp_path / "s", {}, "use")
    store.store(["q"], 1, [item("a")])
    assert store.look_up(["q"], 1) == [item("a")]


WRITER = """
import sys
from pathlib import Path
from retriever.service.cache import ResultCache
store = ResultCache(Path(sys.argv[1]), {}, "use")
print("open", flush=True)
sys.stdin.readline()
for n in range(300):
    name = f"{sys.argv[2]} {n}"
    store.store([name, "shared"], 1, [[({"id": name}, 1.0)], [({"id": "shared"}, 1.0)]])
    assert store.look_up([name], 1) == [[({"id": name}, 1.0)]]
"""


@pytest.mark.medium
def test_two_processes_share_a_store(tmp_path):
    """Both write at the same time: neither fails because the store is locked, and nothing is lost."""
    path = tmp_path / "s"
    command = [sys.executable, "-c", WRITER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, name], **pipes) for name in "ab"]
    for writer in writers:
        assert writer.stdout.readline() == "open\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, error = writer.communicate()
        assert writer.returncode == 0, error
    queries = [f"{name} {n}" for name in "ab" for n in range(300)]
    stored = ResultCache(path, {}, "replay").look_up(queries, 1)
    assert stored == [[({"id": query}, 1.0)] for query in queries]


def test_first_stored_result_stays(store):
    store.store(["a"], 3, [item("é")])
    store.store(["b", "a"], 3, [item("b")] * 2)
    assert store.look_up(["a", "b", "c"], 3) == [item("é"), item("b"), None]
    store.store(["c"], 3, [item("é")])  # nothing is left open
    assert store.look_up(["c"], 3) == [item("é")]
    store.store(["d"], 3, [item("half \ud800 of it")])
    assert store.look_up(["d"], 3) == [item("half \ud800 of it")]


def test_same_query_of_clients_at_once_is_answered_and_stored(index, store):
    counting = Counting(index, seconds=0.05)
    engine = Engine(counting, 3, 3, Limits(max_batch=1, max_wait=0.0), Metrics(), None, store)
    request = RetrieveRequest(queries=["ada almson"], topk=3)

    async def ask():
        return await asyncio.gather(*(engine.answer(request) for _ in range(4)))

    answers = asyncio.run(asyncio.wait_for(ask(), 30))
    assert len(answers[0][0]) == 3
    assert all(answer == answers[0] for answer in answers)
    assert len(counting.batches) > 1  # none of them waited for the store
    assert store.look_up(["ada almson"], 3) == answers[0]


def test_full_disk_costs_no_client_its_answer(index, store, capsys):
    """SQLite's own error, by a limit of its own; it is said once, and again after it has worked."""
    metrics = Metrics()
    engine = Engine(index, 3, 3, Limits(), metrics, None, store)

    def ask(*queries):
        answers = asyncio.run(engine.answer(RetrieveRequest(queries=list(queries), topk=3)))
        assert answers == index.search(queries, 3)
        return metrics.registry.get_sample_value("retriever_unstored_queries_total")

    for outage in (1, 2):
        ask("ada almson", "cy dorn" * outage)
        (pages,) = store._store.execute("PRAGMA page_count").fetchone()
        store._store.execute(f"PRAGMA max_page_count = {pages}")
        for _ in range(2):
            ask(*[f"bo dorn {outage} {n}" for n in range(40)])
        output = capsys.readouterr().err
        assert output.count("warning: ") == 1 and "(database or disk is full); set --cache_path" in output
        assert ask("ada almson") == 80 * outage  # what was stored before is still found
        store._store.execute("PRAGMA max_page_count = 1000000")
    assert store.look_up(["cy dorn", "bo dorn 1 0"], 3) == [index.search(["cy dorn"], 3)[0], None]


def test_single_requests_do_not_wait():
    counting = Counting(ECHO)

    async def run():
        batcher = SearchBatcher(counting.search, Limits(max_wait=600.0))
        for _ in range(3):
            await asyncio.wait_for(batcher.submit(["ada", "bo"], 1), 10)
        await asyncio.gather(batcher.submit(["ada"], 1), batcher.submit(["bo"], 1))
        with pytest.raises(TimeoutError):  # two have come together: the next one waits for another
            await asyncio.wait_for(batcher.submit(["ada"], 1), 0.01)

    asyncio.run(run())
    assert counting.batches == [(2, 1)] * 4


def test_queries_of_a_shared_search_get_their_own_results(index):
    counting = Counting(index, seconds=0.02)
    queries = NAMES * 4

    async def run():
        batcher = SearchBatcher(counting.search, Limits(max_batch=64))
        return await asyncio.gather(*(batcher.submit([query], 3) for query in queries))

    results = asyncio.run(run())
    for query, (hits,) in zip(queries, results, strict=True):
        (alone,) = index.search([query], 3)
        assert [row for row, _ in hits] == [row for row, _ in alone]
        # FAISS multiplies many queries by another kernel, which rounds otherwise.
        assert [score for _, score in hits] == pytest.approx([score for _, score in alone], rel=1e-5)
    assert len(counting.batches) <= 3


def test_large_request_keeps_every_worker_busy(index):
    counting = Counting(index, seconds=0.01)

    async def run():
        batcher = SearchBatcher(counting.search, Limits(max_batch=32, workers=2))
        return await batcher.submit(NAMES * 20, 1)

    results = asyncio.run(run())
    assert [hits[0][0]["contents"].split('"')[1] for hits in results] == NAMES * 20
    sizes = [size for size, _ in counting.batches]
    assert sizes[:9] == [32] * 9
    assert sizes[9:] in ([32], [16, 16])  # workers that end at the same moment share the last queries


def test_failed_search_fails_its_own_queries_only(index):
    def search(queries, k):
        if "bad" in queries:
            raise OSError("disk")
        return index.search(queries, k)

    async def run():
        batcher = SearchBatcher(search, Limits())
        (failed,) = await batcher.submit(["bad"], 1)
        (hits,) = await batcher.submit(["ada almson"], 1)
        return failed, hits

    failed, hits = asyncio.run(run())
    assert isinstance(failed, OSError)
    assert str(failed) == "disk"
    assert hits[0][0]["id"] == "0"


def test_depths_are_not_mixed(index):
    counting = Counting(index)

    async def run():
        batcher = SearchBatcher(counting.search, Limits())
        return await asyncio.gather(batcher.submit(["lives"], 2), batcher.submit(["lives", "bo"], 3))

    first, second = asyncio.run(run())
    assert [len(matches) for matches in first + second] == [2, 3, 3]
    assert counting.batches == [(1, 2), (2, 3)]


def test_query_of_absent_client_is_dropped(index):
    """While it waits; where it is searched already, the others of its search have their results."""
    counting = Held(index)

    async def run():
        batcher = SearchBatcher(counting.search, Limits(max_batch=2))
        tasks = [asyncio.create_task(batcher.submit([name], 1)) for name in ("ada", "bo", "cy", "di")]
        while not counting.batches:
            await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        counting.go_on.set()
        await asyncio.gather(tasks[1], tasks[3])

    asyncio.run(run())
    assert counting.batches == [(2, 1), (1, 1)]


@pytest.mark.parametrize(
    ("workers", "bursts", "most", "expected"),
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
def test_further_searches_begin_where_enough_queries_wait(index, workers, bursts, most, expected):
    """Bursts of queries while no search ends: sizes of all searches, and how many are under way at once."""
    held = Held(index)
    under_way, sizes = [], []

    async def run():
        batcher = SearchBatcher(held.search, Limits(workers=workers, max_batch=32), sizes.append)
        tasks = []
        for burst in bursts:
            names = [NAMES[n % len(NAMES)] for n in range(burst)]
            tasks += [(name, asyncio.create_task(batcher.submit([name], 1))) for name in names]
            # All are queued; then all searches that begin at once have begun.
            await asyncio.sleep(0)
            while batcher._timer is not None or len(held.batches) < len(batcher._searches):
                await asyncio.sleep(0)
        under_way.append(len(held.batches))
        held.go_on.set()
        for name, task in tasks:
            ((matches,),) = await task
            assert name in matches[0]["contents"]

    asyncio.run(run())
    assert (under_way, sizes) == ([most], expected)


def test_request_above_the_queue_is_refused_whole():
    async def work():
        batcher = SearchBatcher(ECHO.search, Limits(max_queue=5))
        first = asyncio.ensure_future(batcher.submit(["a", "b", "c"], 1))
        await asyncio.sleep(0)
        with pytest.raises(RequestFailed):
            await batcher.submit(["d", "e", "f"], 1)
        assert batcher.queued == 3
        second = await batcher.submit(["d", "e"], 1)  # exactly full
        return [matches[0][0]["id"] for matches in [*await first, *second]]

    assert asyncio.run(work()) == ["a", "b", "c", "d", "e"]


def test_full_queue_refuses_and_answers_the_rest(index):
    counting = Counting(index, seconds=0.02)

    async def run():
        batcher = SearchBatcher(counting.search, Limits(max_batch=2, max_queue=4))
        return await asyncio.gather(*(batcher.submit([name], 1) for name in NAMES), return_exceptions=True)

    results = asyncio.run(run())
    refused = [result for result in results if isinstance(result, RequestFailed)]
    answered = [result for result in results if not isinstance(result, RequestFailed)]
    assert len(answered) >= 4
    assert refused
    assert all(error.status == 503 for error in refused)
    assert all(len(result) == 1 for result in answered)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_memory_goes_back_to_the_system():
    blocks = [b"x" * size for size in range(20_000, 24_000)]  # 88 MB, each too small for its own mapping
    before = process_bytes(os.getpid(), "RssAnon")
    pins = blocks[::50]  # keep holes between them
    del blocks
    trim_memory()
    assert process_bytes(os.getpid(), "RssAnon") < before - 40e6
    assert len(pins) == 80


def test_memory_is_trimmed_every_1000_queries(monkeypatch):
    library = Mock()
    monkeypatch.setattr("retriever.service.batcher.ctypes.CDLL", lambda name: library)
    search = Mock(side_effect=[[[]] * 300, [[]] * 600, ValueError("counts too"), [[]] * 999, [[]]])

    async def run():
        batcher = SearchBatcher(search, Limits(max_batch=1000))
        for count, trims in ((300, 0), (600, 0), (300, 1), (999, 1), (1, 2)):
            await batcher.submit(["a"] * count, 1)
            while batcher._searches:
                await asyncio.sleep(0)
            assert library.malloc_trim.call_args_list == [call(0)] * trims

    asyncio.run(run())
