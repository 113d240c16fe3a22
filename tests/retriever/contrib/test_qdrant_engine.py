"""Uploads and searches over HTTP, with Qdrant's own engine behind it."""

import pytest

pytest.importorskip("qdrant_client")
pytest.importorskip("qdrant_edge", reason="needs the package qdrant-edge-py")

from qdrant_rig import qdrant_server
from retriever_rig import people_corpus

from retriever.backends import BuildOptions
from retriever.encoders import HashedEncoder
from retriever.indexes.index import build_index, open_index

pytestmark = pytest.mark.medium


def test_rows_are_uploaded_and_searched_over_http(tmp_path):
    """Several requests at once; storage options and search parameters reach the server."""
    corpus = people_corpus(tmp_path / "corpus.jsonl", 2000)
    with qdrant_server(tmp_path / "engine") as (url, server):
        settings = {"qdrant_url": url, "qdrant_quantization": "int8", "qdrant_replicas": 2}
        options = BuildOptions(kind="qdrant", settings=settings, shard_rows=700, search="hnsw_ef=64")
        build_index(corpus, tmp_path / "i", options, progress=False)
        assert server.shard.info().points_count == 2000 and server.settings["replication_factor"] == 2
        (hits,) = open_index(tmp_path / "i", corpus).search(["person 1234"], 5)
        encoder = HashedEncoder.load(tmp_path / "i")
        exact = encoder.encode_passages(corpus[:]) @ encoder.encode_queries(["person 1234"])[0]
        assert hits[0][0]["id"] == "1234"
        assert [score for _, score in hits] == pytest.approx(sorted(exact.tolist())[:-6:-1], rel=1e-3)
        asked = [search["params"] for search in server.searches]
        assert len(asked) >= 1 and all(params["hnsw_ef"] == 64 for params in asked)
