"""The service's contracts and errors, over a real index."""

import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from retriever_rig import town_rows

from retriever.errors import RetrieverError, Unavailable
from retriever.service.app import make_app
from retriever.service.cache import ResultCache
from retriever.service.engine import Depths

ROWS = town_rows()


@pytest.fixture(scope="module")
def client(towns):
    with TestClient(make_app(towns, Depths(2))) as client:
        yield client


def test_search_r1_contract(client):
    reply = client.post("/retrieve", json={"queries": ["port elton"], "topk": 3, "return_scores": True})
    (documents,) = reply.json()["result"]
    assert len(documents) == 3
    assert documents[0]["document"] == ROWS[2]
    assert documents[0]["score"] >= documents[1]["score"]


def test_rlinf_contract(client):
    reply = client.post("/retrieve", json={"queries": ["port elton", "Zürich"], "return_scores": False})
    result = reply.json()["result"]
    assert [one[0] for one in result] == [ROWS[2], ROWS[3]]
    assert len(result[0]) == 2  # the service's own topk


def test_calibadv_contract(client):
    """Three documents are asked for where the service gives two by itself."""
    body = {"queries": ["port elton"], "topk_retrieval": 3, "return_scores": True, "not_sort": False}
    (documents,) = client.post("/retrieve", json=body).json()["result"]
    assert len(documents) == 3
    assert documents[0]["document"] == ROWS[2]["contents"]
    assert documents[0]["score"] > documents[1]["score"] >= documents[2]["score"]
    without = client.post("/retrieve", json=body | {"return_scores": False}).json()["result"]
    assert without[0] == [item["document"] for item in documents]


class Backwards:
    """A reranker that scores all below zero, the last first."""

    model = "m"

    def rerank(self, queries, found, k):
        return [[(row, -1.0 - n) for n, (row, _) in enumerate(one[::-1])][:k] for one in found]


@pytest.mark.parametrize("return_scores", [True, False])
@pytest.mark.parametrize(
    "depths",
    [
        {"topk": 3},
        {},
        {"topk_retrieval": 3},
        {"topk_retrieval": 3, "topk_rerank": 2},
        {"topk_retrieval": 3, "topk_rerank": 2, "not_sort": True},
    ],
    ids=str,
)
def test_query_without_results_gets_an_empty_list(towns, tmp_path, depths, return_scores):
    """In every contract, alone and among others, from the index and from the store."""
    cache = ResultCache(tmp_path / "store", towns.manifest, "use")
    app = make_app(towns, Depths(2), reranker=Backwards(), cache=cache)
    body = depths | {"queries": ["zzzz", "Limmat", "", "!!!"], "return_scores": return_scores}
    with TestClient(app) as client:
        for _ in range(2):
            first, (hit,), *others = client.post("/retrieve", json=body).json()["result"]
            assert [first, *others] == [[]] * 3 and "Limmat" in str(hit)
        assert client.post("/retrieve", json=body | {"queries": ["zzzz"]}).json() == {"result": [[]]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"queries": ["a"], "topk": 0}, "topk"),
        ({"queries": ["a"], "top_k": 3}, "top_k"),
        ({"queries": ["a"], "topk_retrieval": 3, "topk_rerank": 1}, "no reranker is loaded"),
        ({}, "queries"),
    ],
)
def test_every_error_is_json_that_says_what_to_change(client, body, message):
    reply = client.post("/retrieve", json=body)
    assert reply.status_code == 422
    assert message in reply.json()["error"]


def test_health(client):
    state = client.get("/health").json()
    assert state["status"] == "ready"
    assert state["documents"] == len(ROWS)


class Failing:
    """A searcher whose index cannot be asked."""

    def __init__(self, error):
        self.error, self.manifest = error, {}

    def search(self, queries, k):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RetrieverError("/i/index.faiss: cannot be read; build it again"), 500),
        (Unavailable("no Qdrant"), 503),
    ],
)
def test_an_error_of_the_index_keeps_its_own_message(error, status):
    with TestClient(make_app(Failing(error), Depths(1)), raise_server_exceptions=False) as client:
        reply = client.post("/retrieve", json={"queries": ["a"]})
        assert (reply.status_code, reply.json()) == (status, {"error": str(error)})
        assert reply.headers.get("retry-after") == ("1" if status == 503 else None)
        assert f'route="/retrieve",status="{status}"' in client.get("/metrics").text


def test_an_error_that_nobody_expected_names_its_type():
    with TestClient(
        make_app(Failing(ZeroDivisionError()), Depths(1)), raise_server_exceptions=False
    ) as client:
        reply = client.post("/retrieve", json={"queries": ["a"]})
        assert reply.status_code == 500 and reply.json()["error"].startswith(
            "ZeroDivisionError in the service"
        )
        assert 'route="/retrieve",status="500"' in client.get("/metrics").text


def test_the_reranker_runs_in_one_thread(towns):
    """torch keeps buffers for each thread that calls it."""
    threads = set()

    class Reranker:
        model = "m"

        def rerank(self, queries, found, k):
            threads.add(threading.get_ident())
            time.sleep(0.05)
            return [one[:k] for one in found]

    body = {"queries": ["port elton"], "topk_retrieval": 2, "topk_rerank": 1}
    app = make_app(towns, Depths(2), reranker=Reranker())
    with TestClient(app) as client, ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: client.post("/retrieve", json=body), range(12)))
    assert {reply.status_code for reply in replies} == {200}
    assert len(threads) == 1


def test_the_page_of_the_routes_loads_nothing_from_elsewhere(client):
    """A cluster's nodes reach no CDN: every script and style comes from the service itself."""
    pytest.importorskip("fastapi_offline")
    page = client.get("/docs").text
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(addresses) >= 2 and all(address.startswith("/") for address in addresses)
    assert "http://" not in page and "https://" not in page
    for address in addresses:
        reply = client.get(address)
        assert reply.status_code == 200 and len(reply.content) > 100
    assert "/retrieve" in client.get("/openapi.json").json()["paths"]


def test_without_the_page_s_package_it_says_so(towns, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi_offline", None)
    with TestClient(make_app(towns, Depths(2))) as client:
        reply = client.get("/docs")
        assert reply.status_code == 404 and "pip install fastapi-offline" in reply.json()["error"]
        assert client.get("/openapi.json").status_code == 200
