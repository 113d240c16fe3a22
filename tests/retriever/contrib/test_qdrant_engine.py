"""Qdrant's own engine: uploads over HTTP, and quantisation and search parameters, which the client lacks."""

import numpy as np
import pytest

pytest.importorskip("qdrant_client")
pytest.importorskip("qdrant_edge", reason="needs the package qdrant-edge-py")

from qdrant_engine_rig import qdrant_server
from retriever_rig import write_rows

from retriever.backends import BuildOptions
from retriever.contrib.qdrant import QdrantVectors
from retriever.corpus.passages import load_corpus
from retriever.encoders.hashed import HashedEncoder
from retriever.indexes.build import build_index

pytestmark = pytest.mark.medium
COUNT = 2000
K = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Passages of twelve words, drawn from three hundred."""
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(300)]
    rows = []
    for number in range(COUNT):
        text = " ".join(rng.choice(words, 12))
        rows.append({"id": f"p{number}", "contents": f'"Person {number}"\n{text}'})
    return load_corpus(write_rows(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", rows))


class Served:
    """A collection that was built at a server.

    Attributes:
        quantization: Value of --qdrant_quantization.
        server: The server.
        queries: float32 [40, D].
        scores: Exact scores of all passages, [40, COUNT].
    """

    def __init__(self, quantization, server, url, encoder, corpus):
        self.quantization = quantization
        self.server = server
        self.url = url
        passages = encoder.encode_passages(corpus[:])
        self.queries = passages[:40]
        self.scores = self.queries @ passages.T

    def search(self, parameters):
        return QdrantVectors(None, self.url, "passages", parameters).nearest(self.queries, K)

    def recall(self, parameters):
        _, ids = self.search(parameters)
        best = np.argsort(-self.scores, axis=1)[:, :K]
        shares = [len({*row} & {*expected}) / K for row, expected in zip(ids, best, strict=True)]
        return np.mean(shares)

    def score_error(self, parameters):
        """The largest error of a returned score, as a share of the largest exact one."""
        scores, ids = self.search(parameters)
        exact = np.take_along_axis(self.scores, ids, 1)
        return np.abs(scores - exact).max() / self.scores.max()


@pytest.fixture(scope="module", params=["", "int8"])
def served(request, corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qdrant")
    fit = HashedEncoder.fit
    with pytest.MonkeyPatch.context() as patch, qdrant_server(folder / "engine") as (url, server):
        patch.setattr(HashedEncoder, "fit", classmethod(lambda _, rows: fit(rows, 64)))
        settings = {"qdrant_url": url, "qdrant_quantization": request.param}
        options = BuildOptions(kind="qdrant", settings=settings, shard_rows=700)
        build_index(corpus, folder / "i", options, progress=False)
        assert server.shard.optimize()
        yield Served(request.param, server, url, HashedEncoder.load(folder / "i"), corpus)


def test_every_row_is_uploaded_once(served):
    state = served.server.shard.info()
    assert state.points_count == COUNT
    assert state.indexed_vectors_count == COUNT  # else every search would be exact


def test_quantization_reaches_the_server(served):
    config = served.server.settings.get("quantization_config")
    if served.quantization == "int8":
        assert config["scalar"]["type"] == "int8"
    else:
        assert config is None


def test_exact_search_finds_the_best(served):
    scores, ids = served.search("exact=true")
    np.testing.assert_allclose(scores, -np.sort(-served.scores, axis=1)[:, :K], rtol=1e-5)
    np.testing.assert_allclose(scores, np.take_along_axis(served.scores, ids, 1), rtol=1e-5)


def test_wider_search_finds_more(served):
    narrow = served.recall("hnsw_ef=5,rescore=true,oversampling=8")
    wide = served.recall("hnsw_ef=512,rescore=true,oversampling=8")
    assert narrow < wide
    assert wide > 0.8


def test_scores_are_of_the_codes_unless_rescored(served):
    assert served.score_error("hnsw_ef=64,rescore=true") < 1e-6
    assert served.score_error("hnsw_ef=64,ignore=true") < 1e-6
    for parameters in ("hnsw_ef=64,rescore=false", "hnsw_ef=64"):  # Qdrant's default does not rescore int8
        error = served.score_error(parameters)
        if served.quantization == "int8":
            assert error > 1e-4
        else:
            assert error < 1e-6
