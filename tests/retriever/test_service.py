"""The service's contracts and errors, over a real index."""

import gzip
import json

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from retriever.corpus import load_corpus, split_contents
from retriever.errors import RetrieverError
from retriever.index import build_index, load_index
from retriever.service import make_app

PASSAGES = {
    "adara almson": "adara almson lives in port elton.",
    "adara berkson": "adara berkson knows adara almson of port elton, adara almson herself.",
    "port elton": "port elton has the mayor brulen falkski.",
    "Zürich": "Zürich is a city on the river Limmat.",
}


def rows():
    return [
        {"id": str(i), "contents": f'"{title}"\n{text}', "url": f"u{i}"}
        for i, (title, text) in enumerate(PASSAGES.items())
    ]


@pytest.fixture(scope="module")
def corpus_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


@pytest.fixture(scope="module")
def index(corpus_path):
    corpus = load_corpus(corpus_path)
    folder = corpus_path.parent / "index"
    build_index(corpus, folder, "hashed", progress=False)
    return load_index(folder, corpus)


@pytest.fixture(scope="module")
def client(index):
    with TestClient(make_app(index, topk=2)) as client:
        yield client


@pytest.mark.parametrize("title", PASSAGES)
def test_a_title_finds_its_own_passage_first(index, title):
    ((row, _), *_) = index.search([title], 3)[0]
    assert split_contents(row["contents"])[0] == title


def test_scores_are_bm25_up_to_the_projection(index):
    """Ordering and size agree with BM25 computed from its definition."""
    import math
    import re

    texts = [f"{t} {t} {x}" for t, x in PASSAGES.items()]
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, words)) / len(words)
    query = ["port", "mayor"]
    expected = []
    for passage in words:
        score = 0.0
        for term in query:
            frequency = sum(term in other for other in words)
            idf = math.log1p((len(words) - frequency + 0.5) / (frequency + 0.5))
            count = passage.count(term)
            score += idf * count * 1.9 / (count + 0.9 * (0.6 + 0.4 * len(passage) / mean))
        expected.append(score)
    found = {row["id"]: score for row, score in index.search(["mayor of port"], 4)[0]}
    found_without_of = {row["id"]: score for row, score in index.search(["port mayor"], 4)[0]}
    assert max(found, key=found.get) == "2"
    for number, score in enumerate(expected):
        assert found_without_of[str(number)] == pytest.approx(score, abs=0.2)


def test_garbage_queries_have_deterministic_answers(index):
    assert index.search(["", "🎈", "\0"], 2) == index.search(["", "🎈", "\0"], 2)


def test_search_r1_contract(client):
    reply = client.post("/retrieve", json={"queries": ["port elton"], "topk": 3, "return_scores": True})
    (documents,) = reply.json()["result"]
    assert len(documents) == 3
    assert documents[0]["document"] == rows()[2]
    assert documents[0]["score"] >= documents[1]["score"]


def test_rlinf_contract(client):
    reply = client.post("/retrieve", json={"queries": ["port elton", "Zürich"], "return_scores": False})
    result = reply.json()["result"]
    assert [one[0] for one in result] == [rows()[2], rows()[3]]
    assert len(result[0]) == 2  # the service's own topk


def test_calibadv_contract(client):
    body = {"queries": ["port elton"], "topk_retrieval": 2, "return_scores": True, "not_sort": False}
    (documents,) = client.post("/retrieve", json=body).json()["result"]
    assert documents[0]["document"] == rows()[2]["contents"]
    without = client.post("/retrieve", json=body | {"return_scores": False}).json()["result"]
    assert without[0] == [item["document"] for item in documents]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"queries": []}, "queries"),
        ({"queries": ["a"], "topk": 0}, "topk"),
        ({"queries": ["a" * 9000]}, "longer than 8192 characters"),
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
    assert state["documents"] == len(PASSAGES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "corpus.jsonl:2: not valid JSON"),
        ('{"id": "9"}', "corpus.jsonl:2: expected an object with a non-empty string 'contents'"),
        ('{"contents": "x"}', "corpus.jsonl:2: field 'id'"),
        ('{"id": "0", "contents": "x"}', "corpus.jsonl:2: id '0' was used before"),
    ],
)
def test_malformed_corpus_rows_name_file_and_line(tmp_path, line, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps(rows()[0]) + "\n" + line + "\n")
    with pytest.raises(RetrieverError, match=message):
        load_corpus(path)


def test_gzip_and_plain_corpora_are_the_same(tmp_path, corpus_path):
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus_path.read_bytes()))
    assert load_corpus(packed) == load_corpus(corpus_path)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(RetrieverError, match="broken file"):
        load_corpus(packed)


def test_an_index_of_another_corpus_is_refused(tmp_path, index, corpus_path):
    other = tmp_path / "corpus.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows()[:2]))
    with pytest.raises(RetrieverError, match="built from another corpus"):
        load_index(corpus_path.parent / "index", load_corpus(other))
    with pytest.raises(RetrieverError, match="no complete index"):
        load_index(tmp_path / "none", load_corpus(other))


def test_unknown_encoder_and_factory(tmp_path, index):
    with pytest.raises(RetrieverError, match="encoder 'e6' is unknown"):
        build_index(index.corpus, tmp_path / "a", "e6")
    with pytest.raises(RetrieverError, match="not a FAISS factory string"):
        build_index(index.corpus, tmp_path / "b", "hashed", factory="Nonsense", progress=False)
    assert not (tmp_path / "b").exists()
