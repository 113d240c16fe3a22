"""A service put together from its options."""

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from retriever.options import parse
from retriever.search.manifest import MANIFEST
from retriever.service.assembly import load, load_index


def test_build_if_missing(tmp_path, files):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(tmp_path / "new"), "--build_if_missing"]
    stages = []
    index = load_index(parse(arguments), stages.append)
    assert [row["id"] for row, _ in index.search(["ada carlson"], 1)[0]] == ["2"]
    assert [stage.split()[0] for stage in stages] == ["reading", "building", "loading"]
    before = (tmp_path / "new" / MANIFEST).stat().st_mtime_ns
    load_index(parse(arguments), stages.append)
    assert [stage.split()[0] for stage in stages[3:]] == ["reading", "loading"]
    assert (tmp_path / "new" / MANIFEST).stat().st_mtime_ns == before


def test_options_reach_the_service(files, capsys):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(files[1]), "--host", "0.0.0.0"]
    arguments += ["--retrieval_topk", "5", "--reranking_topk", "2", "--max_queries", "4", "--engine", "jax"]
    with TestClient(load(parse(arguments))) as client:
        (five,) = client.post("/retrieve", json={"queries": ["ada"]}).json()["result"]
        body = {"queries": ["ada"], "topk_retrieval": 5, "not_sort": True}
        (two,) = client.post("/retrieve", json=body).json()["result"]
        assert (len(five), len(two)) == (5, 2)
        assert client.post("/retrieve", json={"queries": ["ada"] * 5}).status_code == 422
        assert client.get("/health").json()["kind"] == "jax"
    assert "0.0.0.0 is open to the network without --token_file" in capsys.readouterr().err
