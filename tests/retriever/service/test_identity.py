"""Each reply of a search says which index gave it: what two services must share to be taken for one."""

import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from retriever_rig import town_rows, write_rows

from retriever.backends import BuildOptions, IndexOptions
from retriever.corpus.passages import Pages, load_corpus
from retriever.indexes.index import build_index, open_index
from retriever.service.app import make_app
from retriever.service.engine import Depths, index_identity


def identity(index, **more):
    with TestClient(make_app(index, Depths(1), **more)) as client:
        state = client.get("/health").json()["identity"]
        reply = client.post("/retrieve", json={"queries": ["port elton"]})
        assert reply.status_code == 200 and reply.headers["x-index-identity"] == state
        return state


def opened(corpus, folder, **options):
    return open_index(folder, load_corpus(corpus), IndexOptions(**options))


def test_copies_of_an_index_have_one_identity(files, tmp_path):
    """Also where another engine searches the copy, exactly as the first."""
    corpus, folder = files
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    moved = shutil.copy(corpus, tmp_path / "rows.jsonl")
    first = identity(opened(corpus, folder))
    assert identity(opened(moved, copy)) == first
    assert identity(opened(moved, copy, engine="jax")) == first
    assert int(first, 16) and len(first) == 32


@pytest.mark.medium
def test_what_decides_the_documents_decides_the_identity(files, tmp_path):
    """One passage less, one word changed, another encoder, another approximation, another reranker."""
    corpus, folder = files
    rows = town_rows()
    changed = [*rows[:-1], rows[-1] | {"contents": rows[-1]["contents"] + " Indeed."}]
    found = {identity(opened(corpus, folder))}
    found.add(identity(opened(corpus, folder), reranker=SimpleNamespace(model="m")))
    for number, (some, options) in enumerate(
        [
            (rows, BuildOptions()),
            (rows[:-1], BuildOptions()),
            (changed, BuildOptions()),
            (rows, BuildOptions("bm25")),
            (rows, BuildOptions(factory="SQ8")),
            (rows, BuildOptions(factory="IVF2,Flat", search="nprobe=1")),
            (rows, BuildOptions(factory="IVF2,Flat", search="nprobe=2")),
        ]
    ):
        file = write_rows(tmp_path / f"{number}.jsonl", some)
        build_index(load_corpus(file), tmp_path / str(number), options, progress=False)
        found.add(identity(opened(file, tmp_path / str(number))))
    assert len(found) == 9


def test_pages_are_part_of_it_and_every_reply_with_pages_says_it(index, tmp_path):
    rows = ['{"url": "a", "contents": "A"}\n', '{"url": "a", "contents": "B"}\n']
    found = {identity(index)}
    for number, row in enumerate([*rows, "\n" + rows[0].strip()]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(row)
        with TestClient(make_app(index, Depths(1), pages=Pages(path))) as client:
            state = client.get("/health").json()
            for urls in (["a"], 5):
                reply = client.post("/access", json={"urls": urls})
                assert reply.headers["x-index-identity"] == state["identity"] and state["pages_sha256"]
        found.add(state["identity"])
    assert len(found) == 3  # blank lines and the last line's end are no part of the pages


def test_where_it_is_served_does_not(index):
    qdrant = {"collection": "c", "documents": 3, "search": "hnsw_ef=8"}
    first = index_identity(qdrant | {"url": "http://a:6333"}, "")
    assert index_identity(qdrant | {"url": "http://b:6333"}, "") == first
    assert index_identity(qdrant | {"search": "hnsw_ef=128"}, "") != first


@pytest.mark.parametrize("body", [{"queries": 3}, {"queries": ["a"], "topk": 0}, {"queries": []}])
def test_also_a_refusal_and_an_empty_reply_say_it(index, body):
    with TestClient(make_app(index, Depths(1), token="secret")) as client:
        state = client.get("/health").json()["identity"]
        refused = client.post("/retrieve", json=body)
        assert refused.status_code == 401 and refused.headers["x-index-identity"] == state
        header = {"Authorization": "Bearer secret"}
        answered = client.post("/retrieve", json=body, headers=header)
        assert answered.status_code in (200, 422) and answered.headers["x-index-identity"] == state
