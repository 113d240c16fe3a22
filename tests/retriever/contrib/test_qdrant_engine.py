"""Uploads and searches over HTTP, with Qdrant's own engine behind it."""

import pytest

pytest.importorskip("qdrant_client")
pytest.importorskip("qdrant_edge", reason="needs the package qdrant-edge-py")

from qdrant_rig import qdrant_server
from retriever_rig import brute_force_ids, ids, people_corpus

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
        index, queries = open_index(tmp_path / "i", corpus), ["person 1234", "lives in town 5"]
        encoder = HashedEncoder.load(tmp_path / "i")
        assert ids(index.search(queries, 5)) == brute_force_ids(encoder, corpus, queries, 5)
        asked = [search["params"] for search in server.searches]
        assert len(asked) >= 2 and all(params["hnsw_ef"] == 64 for params in asked)
