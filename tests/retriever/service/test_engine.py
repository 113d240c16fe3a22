"""Limits of requests and queries."""

import threading

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from retriever_rig import NAMES, Counting

from retriever.service.app import make_app
from retriever.service.engine import MAX_QUERY_LENGTH, Depths, Limits


def test_overload_is_503_with_retry_after(index):
    slow = Counting(index, seconds=0.3)
    with TestClient(make_app(slow, Depths(1), limits=Limits(max_batch=1, max_queue=1))) as client:
        replies = []

        def ask():
            replies.append(client.post("/retrieve", json={"queries": ["ada"]}))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    codes = sorted(reply.status_code for reply in replies)
    assert codes[0] == 200 and codes[-1] == 503
    refused = next(reply for reply in replies if reply.status_code == 503)
    assert refused.headers["retry-after"] == "1" and "try again" in refused.json()["error"]


def test_no_queries_have_no_results(index):
    counting = Counting(index)
    with TestClient(make_app(counting, Depths(1))) as client:
        for body in ({"queries": []}, {"queries": [], "topk_retrieval": 3, "not_sort": True}):
            reply = client.post("/retrieve", json=body)
            assert reply.status_code == 200 and reply.json() == {"result": []}
    assert not counting.batches


def test_a_long_query_is_cut_and_counted_and_the_others_are_answered(index):
    asked = []

    class Noting(Counting):
        def search(self, queries, k):
            asked.extend(queries)
            return super().search(queries, k)

    fits = "b" * MAX_QUERY_LENGTH
    body = {"queries": ["ada almson " + "x" * 9000, "bo dorn", fits], "topk": 1}
    with TestClient(make_app(Noting(index), Depths(1))) as client:
        reply = client.post("/retrieve", json=body)
        assert reply.status_code == 200, reply.text
        assert [found[0]["id"] for found in reply.json()["result"][:2]] == ["0", "7"]
        assert "retriever_cut_queries_total 1.0" in client.get("/metrics").text
    assert asked == [body["queries"][0][:MAX_QUERY_LENGTH], "bo dorn", fits]


def test_many_queries_fit_one_request(index):
    """A paper run's step asks for 512 questions times 5 trajectories."""
    with TestClient(make_app(index, Depths(1))) as client:
        reply = client.post("/retrieve", json={"queries": NAMES * 160})
        assert reply.status_code == 200, reply.text
        assert [found[0]["id"] for found in reply.json()["result"]] == [str(n) for n in range(16)] * 160


@pytest.mark.parametrize("limits", [Limits(max_queries=3), Limits(max_queue=3)])
def test_more_queries_than_can_ever_be_taken_are_refused(index, limits):
    """Also where only the queue is shorter: 503 would tell the client to try again for ever."""
    with TestClient(make_app(index, Depths(1), limits=limits)) as client:
        assert client.post("/retrieve", json={"queries": NAMES[:3]}).status_code == 200
        reply = client.post("/retrieve", json={"queries": NAMES[:4]})
        assert reply.status_code == 422
        assert "4 in one request, and 3 are taken" in reply.json()["error"]
