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


@pytest.fixture(scope="module", params=["", "int8", "binary"])
def served(request, corpus, tmp_path_factory):
    """(quantisation, server, URL, exact scores [queries, COUNT], the queries' vectors)."""
    folder = tmp_path_factory.mktemp("qdrant")
    with pytest.MonkeyPatch.context() as patch, qdrant_server(folder / "engine") as (url, server):
        fit = HashedEncoder.fit
        patch.setattr(HashedEncoder, "fit", classmethod(lambda _, rows: fit(rows, 64)))
        settings = {"qdrant_url": url, "qdrant_quantization": request.param}
        options = BuildOptions(kind="qdrant", settings=settings, shard_rows=700)
        build_index(corpus, folder / "i", options, progress=False)
        assert server.shard.optimize()
        encoder = open_index(folder / "i", corpus)._ranker.encoder
        passages, vectors = encoder.encode_passages(corpus[:]), encoder.encode_passages(corpus[:40])
        yield request.param, server, url, vectors @ passages.T, vectors


def search(url, vectors, parameters):
    return QdrantVectors(None, url, "passages", parameters).nearest(vectors, K)


def share_found(ids, exact):
    best = np.argsort(-exact, axis=1)[:, :K]
    return np.mean([len({*row} & {*required}) / K for row, required in zip(ids, best, strict=True)])


def test_rows_are_uploaded_once_with_settings(served):
    quantization, server, *_ = served
    assert server.shard.info().points_count == COUNT
    assert server.shard.info().indexed_vectors_count == COUNT  # else every search would be exact
    kinds = {"": None, "int8": "scalar", "binary": "binary"}
    assert (kinds[quantization] is None) == (server.settings.get("quantization_config") is None)


def test_exact_search_finds_the_best(served):
    _, _, url, exact, vectors = served
    scores, ids = search(url, vectors, "exact=true")
    np.testing.assert_allclose(scores, -np.sort(-exact, axis=1)[:, :K], rtol=1e-5)
    np.testing.assert_allclose(scores, np.take_along_axis(exact, ids, 1), rtol=1e-5)


def test_wider_search_finds_more(served):
    quantization, _, url, exact, vectors = served
    full = ",rescore=true,oversampling=8"
    narrow, wide = (share_found(search(url, vectors, f"hnsw_ef={ef}{full}")[1], exact) for ef in (5, 512))
    assert narrow < wide and wide > (0.5 if quantization == "binary" else 0.8)


def test_scores_are_of_codes_unless_rescored(served):
    quantization, _, url, exact, vectors = served

    def off(parameters):
        scores, ids = search(url, vectors, f"hnsw_ef=64{parameters}")
        return np.abs(scores - np.take_along_axis(exact, ids, 1)).max() / exact.max()

    assert off(",rescore=true") < 1e-6 and off(",ignore=true") < 1e-6
    codes = off(",rescore=false")
    assert codes < 1e-6 if quantization == "" else codes > 1e-4
    assert off("") > 1e-4 if quantization == "int8" else off("") < 1e-6  # Qdrant's own default
