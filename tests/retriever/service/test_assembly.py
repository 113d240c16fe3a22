"""A service put together from its options."""

import socket

import numpy as np
import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

import faiss
from fastapi.testclient import TestClient
from retriever_rig import served

from retriever.errors import RetrieverError
from retriever.indexes.backend import MANIFEST
from retriever.options import parse
from retriever.service import server as assembly
from retriever.service.server import load, load_index


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
        (five,) = client.post("/retrieve", json={"queries": ["ada dorn"]}).json()["result"]
        body = {"queries": ["ada dorn"], "topk_retrieval": 5, "not_sort": True}
        (two,) = client.post("/retrieve", json=body).json()["result"]
        assert (len(five), len(two)) == (5, 2)
        assert client.post("/retrieve", json={"queries": ["ada"] * 5}).status_code == 422
        assert client.get("/health").json()["kind"] == "jax"
    assert "0.0.0.0 is open to the network without --token_file" in capsys.readouterr().err


def test_a_missing_index_is_built_by_the_builders_options(tmp_path, files):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(tmp_path / "new"), "--build_if_missing"]
    arguments += ["--factory", "HNSW8", "--search", "efSearch=99", "--embeddings", str(tmp_path / "kept")]
    arguments += ["--embedding_dtype", "float16", "--shard_rows", "5"]
    index = load_index(parse(arguments), print)
    assert index.manifest["factory"] == "HNSW8"
    shards = sorted((tmp_path / "kept").glob("shard-*.npy"))
    assert [np.load(path).shape[0] for path in shards] == [5, 5, 5, 1]
    assert np.load(shards[0]).dtype == np.float16
    assert faiss.read_index(str(tmp_path / "new" / "index.faiss")).hnsw.efSearch == 99
    load_index(parse(arguments), print)
    changed = [*arguments, "--factory", "Flat"]
    with pytest.raises(
        RetrieverError, match="--factory Flat: .*/new was built with HNSW8; leave the option out"
    ):
        load_index(parse(changed), print)
    with pytest.raises(RetrieverError, match="--kind jax: .*/new was built with faiss"):
        load_index(parse([*arguments[:5], "--kind", "jax"]), print)
    with pytest.raises(RetrieverError, match="--factory: only a build takes it; add --build_if_missing"):
        parse([*arguments[:4], "--factory", "Flat"])


def test_limits_reach_the_service(files):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(files[1]), "--request_seconds", "0.2"]
    with served(load(parse(arguments))) as address, socket.create_connection(address) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n{")
        assert b" 408 " in connection.recv(1000)


def test_a_search_a_core_but_one_for_the_web(files, tmp_path, monkeypatch):
    """Equal queries of one search are paid for once; those of two searches would be paid for twice."""
    monkeypatch.setattr(assembly, "available_cores", lambda: 6)
    paths = ["--corpus_path", str(files[0]), "--index_path", str(files[1])]
    web = ["--retriever_name", "google", "--cache_path", str(tmp_path / "c"), "--web_budget", "1"]
    for threads, variable, expected in ((0, "1", 6), (0, "2", 3), (0, "99", 1), (4, "1", 4), (4, "2", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert assembly._workers(parse([*paths, "--threads", str(threads)])) == expected
        assert assembly._workers(parse([*web, "--threads", str(threads)])) == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert assembly._workers(parse(paths)) == 6


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_request_seconds_must_be_a_time(value):
    with pytest.raises(RetrieverError, match="--request_seconds is .*must be above 0"):
        parse(["--corpus_path", "c", "--index_path", "i", "--request_seconds", value])
