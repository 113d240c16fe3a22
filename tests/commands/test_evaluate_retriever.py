"""Which retriever answered is part of an evaluation: another one's scores are never handed out."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager

import pytest
from evaluation_rig import Rig
from http_rig import Handler, serving

from calibadv_jax.core.errors import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Rig(tmp_path, monkeypatch)


def rows(run):
    return [json.loads(line) for line in run.file(".jsonl").read_text().splitlines()]


SERVICE = {"status": "ready", "corpus_sha256": "c1", "encoder": "hashed", "model": "", "reranker": ""}


@contextmanager
def service(**health):
    """URL of a service that says this of itself and answers nothing."""

    class Health(Handler):
        def do_GET(self):
            self.reply(200, health)

    with serving(Health) as url:
        yield {"retriever": {"url": url}}


@pytest.mark.parametrize(
    "other", [{"corpus_sha256": "c2"}, {"encoder": "e5"}, {"reranker": "m"}, {"identity": "i2"}], ids=str
)
def test_another_service_is_another_evaluation(run, other):
    with service(**SERVICE) as first, service(**SERVICE | other) as second:
        assert len(run(**first)[1].asked) == 16 and run(**first)[1].asked == []
        assert len(run(**second)[1].asked) == 16
        assert {row["retriever"].get("corpus_sha256") for row in rows(run)} == {
            other.get("corpus_sha256", "c1")
        }


def test_same_service_at_another_address_continues(run):
    with service(**SERVICE) as first, service(**SERVICE | {"status": "loading"}) as second:
        run(**first)
        assert run(**second)[1].asked == []


def test_service_without_description_is_its_address(run):
    with service() as first, service() as second:
        run(**first)
        assert run(**first)[1].asked == []
        assert len(run(**second)[1].asked) == 16
        assert rows(run)[0]["retriever"] == json.loads(run.file(".json").read_text())["retriever"]
        assert rows(run)[0]["retriever"] == second["retriever"]


@pytest.mark.parametrize("method", ["direct", "empty_retriever"])
def test_method_without_search_asks_no_service(run, method):
    keys = {"evaluate": {"method": method}}
    run(**keys, retriever={"url": "http://127.0.0.1:9"})
    assert run(**keys, retriever={"url": "http://127.0.0.1:10"})[1].asked == []


def test_rewritten_corpus_is_another_evaluation(run, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("{}")
    keys = {"retriever": {"corpus": str(corpus)}}
    run(**keys)
    assert run(**keys)[1].asked == []
    os.utime(corpus, ns=(1, 1))
    assert len(run(**keys)[1].asked) == 16


def test_rewritten_pages_are_another_evaluation(run, tmp_path):
    corpus, pages = tmp_path / "corpus.jsonl", tmp_path / "pages.jsonl"
    corpus.write_text("one\n")
    pages.write_text("one\n")
    keys = {"retriever": {"corpus": str(corpus), "pages": str(pages)}}
    assert len(run(**keys)[1].asked) == 16 and run(**keys)[1].asked == []
    os.utime(pages, ns=(1, 1))
    assert len(run(**keys)[1].asked) == 16


def test_waiting_for_a_service_is_reported(run, capsys):
    with pytest.raises(UserError, match="cannot be reached"):
        run(retriever={"url": "http://127.0.0.1:9", "patience": 0.3})
    assert "retriever http://127.0.0.1:9" in "".join(capsys.readouterr())
