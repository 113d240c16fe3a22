"""The trainer's side of reranking: what it asks for, what it understands, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from packages import need
from pydantic import ValidationError

from calibadv_jax.config import Config, DataConfig, RetrieverConfig
from calibadv_jax.contrib.cli.doctor import check_retriever
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.questions import write_questions
from calibadv_jax.services.retriever_process import RetrieverProcess, check_running, open_retriever

pytest.importorskip("aiohttp")
pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from rerank_rig import tiny_cross_encoder
from search_rig import search

from retriever.options import parse

need("sentence_transformers")
pytestmark = pytest.mark.medium

NAMES = [f"{first} {last}" for first in ("ada", "bo", "cy", "di") for last in ("almson", "berkson", "dorn")]
RERANKED = {"rerank_candidates": 6, "topk": 2}


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """Config of a child service over twelve passages, with a reranker."""
    folder = tmp_path_factory.mktemp("child")
    rows = [
        {"id": f"p{number}", "contents": f'"{name}"\n{name} knows ada.'} for number, name in enumerate(NAMES)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cross = tiny_cross_encoder(folder / "cross", [word for name in NAMES for word in name.split()])
    files = {"corpus": str(folder / "corpus.jsonl"), "index": str(folder / "index")}
    return RetrieverConfig(**files, reranker=str(cross), **RERANKED)


@pytest.fixture(scope="module")
def service(child, tmp_path_factory):
    with RetrieverProcess(child, tmp_path_factory.mktemp("log") / "log.txt") as process:
        yield process.url


def test_trainer_gets_the_best_reranked_documents(service, child):
    from retriever.corpus.passages import load_corpus
    from retriever.encoders.reranker import Reranker
    from retriever.indexes.index import open_index

    queries = ["ada almson", "bo dorn"]
    candidates = open_index(Path(child.index), load_corpus(Path(child.corpus))).search(queries, 6)
    expected = Reranker(child.reranker).rerank(queries, candidates, 2)
    documents = search(service, queries, timeout=10.0, **RERANKED)
    plain = search(service, queries, timeout=10.0, topk=2)
    reranked = [[document.id for document in each] for each in documents]
    assert reranked == [[row["id"] for row, _ in each] for each in expected]
    unranked = [[row["id"] for row, _ in each[:2]] for each in candidates]
    assert [[document.id for document in each] for each in plain] == unranked != reranked
    scores = [document.score for document in documents[0]]
    assert scores == pytest.approx([score for _, score in expected[0]], abs=1e-4)
    assert documents[0][0].title in NAMES and documents[0][0].text.endswith("knows ada.")


def test_child_has_the_options_of_its_config():
    config = RetrieverConfig(corpus="c", pages="p", encoder="dense", model="m", reranker="r", **RERANKED)
    command = RetrieverProcess(config, Path("log")).command
    options = vars(parse([*command[command.index("retriever.serve") + 1 :], "--port", "0"]))
    expected = {"corpus_path": Path("c"), "index_path": Path("c.index"), "pages_path": Path("p")}
    expected |= {"retriever_name": "dense", "retriever_model": "m", "reranker_model": "r"}
    assert options == options | expected | {"retrieval_topk": 2, "threads": 1}
    running = config.at("http://h")  # it has models of its own
    assert running == replace(config, url="http://h", model="", reranker="")


def test_searches_refuse_a_reranker_without_effect(service, tmp_path):
    with pytest.raises(UserError, match="would be without effect"):
        open_retriever(RetrieverConfig(url=service), tmp_path / "log.txt", print).__enter__()
    with open_retriever(RetrieverConfig(url=service, **RERANKED), tmp_path / "log.txt", print) as url:
        assert url == service


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rerank_candidates": 2, "topk": 3}, "raise the first .* or lower the second"),
        ({"reranker": "model", "corpus": "c"}, "'model' would be without effect"),
        ({"reranker": "model", "rerank_candidates": 0}, "'model' would be without effect"),
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


def test_reranker_that_is_asked_for_and_absent_is_named(child, tmp_path):
    """A service without a reranker refuses the request as well as the start."""
    bare = RetrieverConfig(corpus=child.corpus, index=child.index)
    with RetrieverProcess(bare, tmp_path / "log.txt") as process:
        config = RetrieverConfig(url=process.url, **RERANKED)
        with pytest.raises(
            UserError, match="has no reranker, but retriever.rerank_candidates is 6; start it with"
        ):
            check_running(config, print)
        with pytest.raises(
            UserError, match="no reranker is loaded.*rerank_candidates=6 and retriever.topk=2"
        ):
            search(process.url, ["ada"], timeout=10.0, **RERANKED)


def test_running_service_takes_the_config_of_its_child(child, service):
    """Commands that go on with the url of a child service have its other settings."""
    check_running(child.at(service), print)


@pytest.mark.parametrize(
    "config",
    [{"rerank_candidates": 0}, RERANKED],
    ids=["not reranked", "reranked"],
)
def test_config_that_fits_the_reranker_is_accepted(service, config):
    check_running(RetrieverConfig(url=service, **config), print)


def test_doctor_says_who_reranks(child, service, tmp_path):
    write_questions(tmp_path / "eval.jsonl", [Question("1", "ada almson?", ("x",), "test")])
    data = DataConfig(eval=str(tmp_path / "eval.jsonl"))

    def reranking_line(**config):
        return check_retriever(Config(data=data, retriever=RetrieverConfig(url=service, **config)))[1]

    assert reranking_line(**RERANKED) == f"6 documents reranked to 2 by {child.reranker}"
    assert reranking_line(rerank_candidates=0, topk=4) == "not reranked: the best 4 documents"
