"""Qdrant's own engine: uploads over HTTP, and quantisation and search parameters, which the client lacks."""

import numpy as np
import pytest

pytest.importorskip("qdrant_client")
pytest.importorskip("qdrant_edge", reason="needs the package qdrant-edge-py")

from qdrant_rig import qdrant_server

from retriever.backends import BuildOptions
from retriever.contrib.qdrant import QdrantVectors
from retriever.corpus.passages import load_corpus
from retriever.encoders import HashedEncoder
from retriever.indexes.index import build_index, open_index

pytestmark = pytest.mark.medium
COUNT, K = 2000, 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(300)]
    with path.open("w") as file:
        for number in range(COUNT):
            text = " ".join(rng.choice(words, 12))
            file.write(f'{{"id": "p{number}", "contents": "\\"Person {number}\\"\\n{text}"}}\n')
    return load_corpus(path)


def test_rows_are_uploaded_and_searched_over_http(corpus, tmp_path, monkeypatch):
    """Several requests at once; codes unless rescored, and more is found the wider it searches."""
    fit = HashedEncoder.fit
    monkeypatch.setattr(HashedEncoder, "fit", classmethod(lambda _, rows: fit(rows, 64)))
    with qdrant_server(tmp_path / "engine") as (url, server):
        settings = {"qdrant_url": url, "qdrant_quantization": "int8"}
        options = BuildOptions(kind="qdrant", settings=settings, shard_rows=700)
        build_index(corpus, tmp_path / "i", options, progress=False)
        assert server.shard.optimize() and server.shard.info().points_count == COUNT
        assert server.shard.info().indexed_vectors_count == COUNT  # else every search would be exact
        encoder = open_index(tmp_path / "i", corpus)._ranker.encoder
        passages, vectors = encoder.encode_passages(corpus[:]), encoder.encode_passages(corpus[:40])
        exact = vectors @ passages.T
        best = np.argsort(-exact, axis=1)[:, :K].tolist()

        def search(parameters):
            """The largest error of a score, and the share of the best that is found."""
            scores, ids = QdrantVectors(None, url, "passages", parameters).nearest(vectors, K)
            error = np.abs(scores - np.take_along_axis(exact, ids, 1)).max() / exact.max()
            hits = [len({*row} & {*required}) / K for row, required in zip(ids.tolist(), best, strict=True)]
            return error, np.mean(hits)

        for parameters in ("exact=true", "hnsw_ef=64,ignore=true", "hnsw_ef=64,rescore=true"):
            assert search(parameters)[0] < 1e-6, parameters
        assert search("exact=true")[1] == pytest.approx(1, abs=0.02)
        for parameters in ("hnsw_ef=64", "hnsw_ef=64,rescore=false"):
            assert search(parameters)[0] > 1e-4, parameters
        narrow, wide = (search(f"hnsw_ef={ef},rescore=true,oversampling=8")[1] for ef in (5, 512))
        assert narrow < wide and wide > 0.8
