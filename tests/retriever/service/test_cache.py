"""A run is repeated from the store, exactly."""

import asyncio
import sqlite3
import subprocess
import sys
import threading

import pytest
from fastapi.testclient import TestClient
from retriever_rig import Counting

from retriever.errors import RetrieverError
from retriever.service.app import make_app
from retriever.service.cache import ResultCache
from retriever.service.engine import Engine, Limits, Metrics, RetrieveRequest

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


def test_store_repeats_a_run_and_names_a_miss(index, tmp_path):
    counting = Counting(index)
    body = {"queries": ["ada almson", "bo dorn"], "topk": 3, "return_scores": True}
    path = tmp_path / "store.sqlite"
    with TestClient(make_app(counting, 3, cache=ResultCache(path, index.manifest, "use"))) as client:
        first = client.post("/retrieve", json=body).json()
        assert client.post("/retrieve", json=body).json() == first
        assert sum(size for size, _ in counting.batches) == 2
        assert "retriever_cached_queries_total 2.0" in client.get("/metrics").text
    with TestClient(make_app(counting, 3, cache=ResultCache(path, index.manifest, "replay"))) as client:
        assert client.post("/retrieve", json=body).json() == first
        missed = client.post("/retrieve", json=body | {"queries": ["cy carlson"]})
        assert missed.status_code == 409 and "'cy carlson' was not recorded" in missed.json()["error"]
        assert client.post("/retrieve", json=body | {"topk": 2}).status_code == 409
    assert sum(size for size, _ in counting.batches) == 2
    other = ResultCache(path, index.manifest | {"encoder": "other"}, "use")
    assert other.look_up(["ada almson"], 3) == [None]


def test_damaged_or_missing_store_is_refused(tmp_path):
    path = tmp_path / "store.sqlite"
    with pytest.raises(RetrieverError, match="nothing was recorded here"):
        ResultCache(path, {}, "replay")
    path.write_bytes(b"no database at all, but long enough to look like a file" * 50)
    with pytest.raises(RetrieverError, match="not a result store"):
        ResultCache(path, {}, "use")


def item(name):
    return [({"id": name, "contents": f"text of {name}"}, 1.0)]


def test_half_failed_insert_is_rolled_back(tmp_path):
    """Unlike a full disk, most errors leave SQLite's transaction open: here one of the second row."""
    store = ResultCache(tmp_path / "s", {}, "use")
    store._store.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON results WHEN NEW.found LIKE '%refused%'"
        " BEGIN SELECT RAISE(FAIL, 'not this one'); END"
    )
    with pytest.raises(RetrieverError, match="results cannot be stored .*not this one"):
        store.store(["a", "b"], 1, [item("a"), item("refused")])
    assert store.look_up(["a", "b"], 1) == [None, None]
    store.store(["c"], 1, [item("c")])
    assert ResultCache(tmp_path / "s", {}, "use").look_up(["c"], 1) == [item("c")]  # written, not only begun


def test_opening_waits_for_another_process(tmp_path):
    path = tmp_path / "s"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    thread = threading.Timer(0.3, other.execute, ["COMMIT"])
    thread.start()
    store = ResultCache(path, {}, "use")
    thread.join()
    store.store(["q"], 1, [item("a")])
    assert store.look_up(["q"], 1) == [item("a")]


def test_two_processes_share_a_store(tmp_path):
    """Both write at the same time: none is told that the store is locked, and nothing is lost."""
    path = tmp_path / "s"
    command = [sys.executable, "-c", WRITER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, name], **pipes) for name in "ab"]
    assert [writer.stdout.readline() for writer in writers] == ["open\n"] * 2
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, output = writer.communicate(timeout=60)
        assert writer.returncode == 0, output
    names = [f"{name} {n}" for name in "ab" for n in range(300)]
    kept = ResultCache(path, {}, "replay").look_up(names, 1)
    assert [results[0][0]["id"] for results in kept] == names


@pytest.fixture
def store(tmp_path):
    return ResultCache(tmp_path / "store.sqlite", {"encoder": "x"}, "use")


def test_first_stored_result_stays(store):
    store.store(["a"], 3, [item("é")])
    store.store(["b", "a"], 3, [item("b")] * 2)
    assert store.look_up(["a", "b", "c"], 3) == [item("é"), item("b"), None]
    store.store(["c"], 3, [item("é")])  # nothing is left open
    assert store.look_up(["c"], 3) == [item("é")]
    store.store(["d"], 3, [item("half \ud800 of it")])
    assert store.look_up(["d"], 3) == [item("half \ud800 of it")]


def test_equal_queries_at_once_are_all_answered(index, store):
    counting = Counting(index, seconds=0.05)
    engine = Engine(counting, 3, 3, Limits(max_batch=1, max_wait=0.0), Metrics(), None, store)
    request = RetrieveRequest(queries=["ada almson"], topk=3)

    async def ask():
        return await asyncio.gather(*(engine.answer(request) for _ in range(4)))

    answers = asyncio.run(asyncio.wait_for(ask(), 30))
    assert len(answers[0][0]) == 3 and all(answer == answers[0] for answer in answers)
    assert len(counting.batches) > 1  # they did ask at once
    assert store.look_up(["ada almson"], 3) == answers[0]


def test_full_disk_costs_no_client_its_answer(index, store, capsys):
    """SQLite's own error, by a limit of its own; it is said once, and again after it has worked."""
    engine_metrics = Metrics()
    engine = Engine(index, 3, 3, Limits(), engine_metrics, None, store)

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
        output = capsys.readouterr().err
        assert output.count("warning: ") == 1
        assert "results cannot be stored (database or disk is full); set --cache_path" in output
        assert unstored() == 80 * outage
        ask("ada almson")  # what was stored before is still found
        assert unstored() == 80 * outage
        store._store.execute("PRAGMA max_page_count = 1000000")
        ask("cy dorn" * outage)
        (pages,) = store._store.execute("PRAGMA page_count").fetchone()
    assert store.look_up(["cy dorn", "bo dorn 1 0"], 3) == [index.search(["cy dorn"], 3)[0], None]
