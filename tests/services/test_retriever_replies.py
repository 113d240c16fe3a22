"""What the client makes of a reply, in both contracts."""

import json

import pytest
from http_rig import replying

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.services.http_client import BadReply, HttpReply
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_health import index_difference
from calibadv_jax.services.retriever_replies import ServerError, Unavailable, read_documents, read_page


def read(*items, is_reranked):
    reply = HttpReply(200, json.dumps({"result": [items]}).encode())
    (documents,) = read_documents("http://a", reply, 1, is_reranked)
    return documents


@pytest.mark.parametrize("row", ["p7", 7, 0, ""], ids=repr)
def test_passage_keeps_its_id_in_both_contracts(row):
    text = '"Ada"\nfirst part\nand on'
    plain = read({"document": {"id": row, "contents": text}, "score": 0.5}, is_reranked=False)
    ranked = read({"document": text, "id": row, "score": 0.5}, is_reranked=True)
    assert plain == ranked
    assert (plain[0].id, plain[0].title, plain[0].text) == (str(row), "Ada", "first part\nand on")
    assert plain[0].score == 0.5 and read(is_reranked=False) == read(is_reranked=True) == []


@pytest.mark.parametrize(
    ("body", "state"),
    [(b'{"model": "\\ud83d"}', {"model": "\ufffd"}), (b"[" * 100_000, {}), (b"\xff", {})],
    ids=["surrogate", "brackets", "no UTF-8"],
)
def test_odd_health_of_a_service_is_read(body, state):
    with replying((200, body)) as (url, _):
        assert RetrieverClient(RetrieverConfig(timeout=5.0, patience=0.1), url).health() == state


def test_foreign_passages_are_identified_by_text():
    texts = ['"Ada"\nfirst part', '"Ada"\nsecond part']
    items = [{"document": text, "score": 1.0} for text in texts]
    first, second = read(*items, is_reranked=True)
    assert [first.id, second.id] == texts and first.title == second.title == "Ada"
    assert (first.text, second.text) == ("first part", "second part")
    with pytest.raises(BadReply):
        read(*items, is_reranked=False)


@pytest.mark.parametrize(("status", "kind"), [(503, Unavailable), (429, Unavailable), (500, ServerError)])
def test_outage_says_how_long_to_wait(status, kind):
    reply = HttpReply(status, b"", {"Retry-After": "7"})
    for read_reply in (
        lambda: read_documents("http://a", reply, 1, False),
        lambda: read_page("http://a", reply, ""),
    ):
        with pytest.raises(Unavailable) as outage:
            read_reply()
        assert type(outage.value) is kind and outage.value.retry_after == 7


@pytest.mark.parametrize(
    ("agreed", "state", "words"),
    [
        ({"encoder": "e5"}, {"encoder": "e5", "documents": 9, "identity": "a"}, ""),
        ({"encoder": "e5", "identity": "a"}, {"encoder": "e5"}, ""),  # one of them has no such string
        ({"model": "m", "identity": "a"}, {"model": "m", "identity": "b"}, "identity 'b' instead of 'a'"),
        ({"encoder": "e5"}, {}, "encoder None instead of 'e5'"),
        ({}, {"pages_sha256": "p"}, "pages_sha256 'p' instead of None"),
        ({"model": "m"}, {"model": "n", "reranker": "r"}, "model 'n' instead of 'm'"),
    ],
)
def test_services_differ_by_what_decides_their_documents(agreed, state, words):
    assert index_difference(agreed, state) == words
