"""Pages by their URL."""

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

import json

from fastapi.testclient import TestClient

from retriever.corpus import passages as offsets
from retriever.corpus.passages import Pages
from retriever.errors import RetrieverError
from retriever.service.app import make_app
from retriever.service.engine import Depths


def test_pages_by_url(index, tmp_path):
    path = tmp_path / "pages.jsonl"
    rows = [{"url": "https://w/index.php?title=A", "contents": "a"}, {"url": "u", "contents": "ü"}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    with TestClient(make_app(index, Depths(1), pages=Pages(path))) as client:
        urls = ["https://w/index.php/A", "u", "nowhere"]
        assert client.post("/access", json={"urls": urls}).json() == {"result": [*rows, None]}
    path.write_text('{"url": "u", "contents": ""}\n{"contents": "no url"}\n')
    with pytest.raises(RetrieverError, match="pages.jsonl:2: expected a JSON object with 'url'"):
        Pages(path)
    with TestClient(make_app(index, Depths(1))) as client:
        assert (
            "start the service with --pages_path"
            in client.post("/access", json={"urls": ["u"]}).json()["error"]
        )


def test_malformed_pages_are_one_line(tmp_path, monkeypatch):
    path = tmp_path / "pages.jsonl"
    path.write_text('{"url": ' + "[" * 200_000)
    with pytest.raises(RetrieverError, match="pages.jsonl:1: expected a JSON object with 'url'"):
        Pages(path)
    monkeypatch.setattr(offsets, "MAX_LINE", 30)
    path.write_text(json.dumps({"url": "u", "contents": "a" * 50}))
    with pytest.raises(RetrieverError, match="pages.jsonl:1: longer than 30 bytes"):
        Pages(path)


def test_a_file_that_is_replaced_changes_nothing_and_one_that_is_rewritten_is_noticed(tmp_path):
    path, other = tmp_path / "pages.jsonl", tmp_path / "other.jsonl"
    rows = [{"url": name, "contents": name * 9} for name in "abc"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pages = Pages(path)
    other.write_text('{"url": "b", "contents": "other"}\n')
    other.replace(path)
    assert [pages.access(name) for name in "cab"] == [rows[2], rows[0], rows[1]]

    pages = Pages(path)
    for changed in ('{"url": "c", "contents": "third"}\n', "{", ""):
        path.write_text(changed)
        with pytest.raises(RetrieverError, match="pages.jsonl: changed while it is served"):
            pages.access("b")
