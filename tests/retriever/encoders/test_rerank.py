"""Reranking by a randomly initialised cross-encoder: the wiring, not the quality."""

import pytest
from packages import need

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from rerank_rig import tiny_cross_encoder
from retriever_rig import NAMES

from retriever.encoders import Reranker, passage_text
from retriever.service.app import make_app
from retriever.service.engine import Depths

need("sentence_transformers")
pytestmark = pytest.mark.medium

BODY = {"queries": ["ada almson"], "topk_retrieval": 6, "topk_rerank": 3, "return_scores": True}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return Reranker(
        str(tiny_cross_encoder(tmp_path_factory.mktemp("cross"), " ".join(NAMES).split())), batch_size=3
    )


def ids(found):
    return [row["id"] for row, _ in found]


def test_the_best_are_kept_best_first(index, reranker):
    """Best by the cross-encoder's own score of each pair, whatever order they were retrieved in."""
    queries = ["ada almson", "bo dorn"]
    found = index.search(queries, 6)
    whole = reranker.rerank(queries, found, 6)
    for query, one, before in zip(queries, whole, found, strict=True):
        own = {
            row["id"]: reranker._encoder.predict([(query, passage_text(row["contents"]))])[0]
            for row, _ in before
        }
        assert ids(one) == sorted(own, key=own.get, reverse=True) != ids(before)
        assert [score for _, score in one] == pytest.approx([own[name] for name in ids(one)], abs=1e-5)
    for one, all_six, before in zip(reranker.rerank(queries, found, 3), whole, found, strict=True):
        scores = [score for _, score in all_six]
        assert scores == sorted(scores, reverse=True)
        assert one == all_six[:3]
        assert sorted(ids(all_six)) == sorted(ids(before))
    assert reranker.rerank(["x"], [[]], 3) == [[]]


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ('"Ada (poet)"\nShe wrote.\nMuch.', '(Title: "Ada (poet)") She wrote.\nMuch.'),
        ("no title", "(Title: no title) "),
    ],
)
def test_the_reranker_reads_what_the_authors_server_gives_theirs(contents, text):
    assert passage_text(contents) == text


def test_calibadv_requests_are_reranked_and_others_are_not(index, reranker):
    (best,) = reranker.rerank(BODY["queries"], index.search(BODY["queries"], 6), 3)
    with TestClient(make_app(index, Depths(6), reranker=reranker)) as client:
        (items,) = client.post("/retrieve", json=BODY).json()["result"]
        assert [item["document"] for item in items] == [row["contents"] for row, _ in best]
        assert [item["id"] for item in items] == ids(best)
        for depth in (1, 5):  # the service's own is 3
            (other,) = client.post("/retrieve", json=BODY | {"topk_rerank": depth}).json()["result"]
            assert len(other) == depth and other[:3] == items[:depth]
        plain = client.post("/retrieve", json={"queries": ["ada almson"], "topk": 6, "return_scores": True})
        assert len(plain.json()["result"][0]) == 6
        assert "retriever_reranked_queries_total 3.0" in client.get("/metrics").text
        assert client.get("/health").json()["reranker"] == reranker.model
    with TestClient(make_app(index, Depths(6))) as client:
        assert client.get("/health").json()["reranker"] == ""


def test_not_sort_gives_the_first_in_retrieval_order_without_reranking(index, reranker):
    (found,) = index.search(BODY["queries"], 6)
    (best,) = reranker.rerank(BODY["queries"], [found], 3)
    assert set(ids(best)) != set(ids(found[:3]))  # the best by cross-encoder are others
    expected = [{"document": row["contents"], "score": score, "id": row["id"]} for row, score in found[:3]]
    for loaded in (reranker, None):
        with TestClient(make_app(index, Depths(6, rerank_topk=3), reranker=loaded)) as client:
            for body in (BODY, {name: value for name, value in BODY.items() if name != "topk_rerank"}):
                (items,) = client.post("/retrieve", json=body | {"not_sort": True}).json()["result"]
                assert items == expected
