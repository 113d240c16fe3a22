"""What the client makes of a reply, in both contracts."""

import json

import pytest

from calibadv_jax.services.http_client import Reply
from calibadv_jax.services.retriever_replies import BadReply, read_documents


def read(*items, is_reranked):
    (documents,) = read_documents(
        "http://a", Reply(200, json.dumps({"result": [items]}).encode()), 1, is_reranked
    )
    return documents


@pytest.mark.parametrize("row", ["p7", 7, 0, ""], ids=repr)
def test_a_passage_keeps_the_id_of_its_row_in_both_contracts(row):
    """Supporting passages are told by it."""
    text = '"Ada"\nfirst part\nand on'
    plain = read({"document": {"id": row, "contents": text}, "score": 0.5}, is_reranked=False)
    ranked = read({"document": text, "id": row, "score": 0.5}, is_reranked=True)
    assert plain == ranked
    assert (plain[0].id, plain[0].title, plain[0].text) == (str(row), "Ada", "first part\nand on")
    assert plain[0].score == 0.5


@pytest.mark.parametrize("is_reranked", [False, True])
def test_empty_list_is_no_documents(is_reranked):
    assert read(is_reranked=is_reranked) == []


def test_passages_of_another_service_are_known_by_their_text():
    """The authors' service sends no ids; two passages of one article are two documents."""
    texts = ['"Ada"\nfirst part', '"Ada"\nsecond part']
    body = {"result": [[{"document": text, "score": 1.0} for text in texts]]}
    reply = Reply(200, json.dumps(body).encode())
    (documents,) = read_documents("http://a", reply, 1, is_reranked=True)
    assert [one.id for one in documents] == texts
    assert [(one.title, one.text) for one in documents] == [("Ada", "first part"), ("Ada", "second part")]
    with pytest.raises(BadReply):
        read_documents("http://a", reply, 1, is_reranked=False)
