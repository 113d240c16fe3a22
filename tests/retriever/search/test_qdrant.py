"""Qdrant in the client's embedded mode: payloads, others' collections, stopped uploads, options."""

import json

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")
pytest.importorskip("qdrant_client")

from fastapi.testclient import TestClient
from qdrant_client import QdrantClient, models

from retriever.corpus.passages import load_corpus
from retriever.encoders.hashed import HashedEncoder
from retriever.errors import RetrieverError
from retriever.indexing import qdrant as uploading
from retriever.indexing.builder import build_index
from retriever.indexing.options import BuildOptions
from retriever.options import parse
from retriever.search.backends import collection as collection_module
from retriever.search.backends.collection import Collection, CollectionOptions
from retriever.search.backends.qdrant import search_params
from retriever.search.opening import open_index
from retriever.service.assembly import load


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [
        {"id": f"p{i}", "contents": f'"Person {i}"\nlives in town {i % 7}.', "url": f"u{i}"}
        for i in range(50)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_corpus(path)


@pytest.fixture
def encoder(corpus, monkeypatch):
    """An encoder of 4,096 dimensions under the name of one with weights, as a collection needs one."""
    made = HashedEncoder.fit(corpus)
    monkeypatch.setattr(collection_module, "make_encoder", lambda name, model, rows: made)
    return made


def upload(folder, corpus, encoder, collection="wiki_collection_m24_cef512", **payload):
    """As RLinf's script: ids are row numbers, cosine, the corpus row as payload."""
    client = QdrantClient(path=str(folder))
    size = models.VectorParams(size=encoder.dimension, distance=models.Distance.COSINE)
    client.create_collection(collection, size, hnsw_config=models.HnswConfigDiff(m=24, ef_construct=512))
    vectors = encoder.encode_passages(corpus[:])
    points = [
        models.PointStruct(id=n, vector=vector.tolist(), payload=payload or row)
        for n, (vector, row) in enumerate(zip(vectors, corpus, strict=True))
    ]
    client.upsert(collection, points)
    client.close()
    return CollectionOptions(str(folder), collection, "e5")


def test_a_collection_of_rlinf_is_served_as_it_is(tmp_path, corpus, encoder):
    upload(tmp_path, corpus, encoder)
    arguments = ["--qdrant_url", str(tmp_path), "--qdrant_collection", "wiki_collection_m24_cef512"]
    with TestClient(load(parse([*arguments, "--retriever_name", "e5", "--port", "0"]))) as client:
        reply = client.post("/retrieve", json={"queries": ["person 17", "person 3"], "topk": 2})
        found = reply.json()["result"]
        assert [one[0] for one in found] == [corpus[17], corpus[3]]
        assert [len(one) for one in found] == [2, 2]
        state = client.get("/health").json()
        assert (state["kind"], state["documents"], state["encoder"]) == ("qdrant", 50, "hashed")


def test_other_fields_of_a_payload(tmp_path, corpus, encoder):
    options = upload(tmp_path, corpus, encoder, text="a text without a number", page=7)
    with pytest.raises(
        RetrieverError, match=r"point 0 has no text in 'contents' \(it has text, page\); set --qdrant"
    ):
        Collection(options)


def test_what_no_collection_can_be(tmp_path, corpus, encoder, monkeypatch):
    options = upload(tmp_path, corpus, encoder)
    small = HashedEncoder.fit(corpus, 64)
    with pytest.raises(RetrieverError, match="collection 'none': cannot be opened"):
        Collection(CollectionOptions(str(tmp_path), "none", "e5"))
    with pytest.raises(RetrieverError, match="--retriever_name hashed: its counts lie in an index's folder"):
        Collection(CollectionOptions(str(tmp_path), options.qdrant_collection, "hashed"))
    monkeypatch.setattr(collection_module, "make_encoder", lambda *_: small)
    with pytest.raises(RetrieverError, match="holds vectors of dimension 4096, and .* makes 64"):
        Collection(options)
    other = HashedEncoder.fit(corpus)
    other._projection = -other._projection
    monkeypatch.setattr(collection_module, "make_encoder", lambda *_: other)
    with pytest.raises(
        RetrieverError, match=r"vector of point 0 is not what .* makes of its text \(cosine -"
    ):
        Collection(options)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (models.VectorParams(size=4, distance=models.Distance.EUCLID), "its distance is Euclid"),
        ({"a": models.VectorParams(size=4, distance=models.Distance.DOT)}, r"has named vectors \(a\)"),
    ],
)
def test_collections_of_another_kind(tmp_path, encoder, size, message):
    client = QdrantClient(path=str(tmp_path))
    client.create_collection("c", size)
    client.close()
    with pytest.raises(RetrieverError, match=message):
        Collection(CollectionOptions(str(tmp_path), "c", "e5"))


@pytest.mark.filterwarnings("ignore:Local mode performs exact")
def test_a_build_uploads_each_row_as_payload(tmp_path, corpus, encoder):
    """So that the collection is served without corpus and index folder afterwards."""
    options = BuildOptions(kind="qdrant", qdrant_url=str(tmp_path / "db"), shard_rows=20, search="hnsw_ef=64")
    build_index(corpus, tmp_path / "i", options, progress=False)
    index = open_index(tmp_path / "i", corpus)
    assert index.search(["person 17"], 1)[0][0][0] == corpus[17]
    assert index.manifest["search"] == "hnsw_ef=64"
    index._ranker._vectors._connection._client.close()
    served = Collection(CollectionOptions(str(tmp_path / "db"), "passages", "e5"))
    assert served.search(["person 17"], 1)[0][0][0] == corpus[17]


def test_an_upload_that_was_stopped_goes_on_by_shards(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(uploading, "BATCH", 5)
    options = BuildOptions(kind="qdrant", qdrant_url=str(tmp_path / "db"), shard_rows=20)
    upsert, sent = QdrantClient.upsert, []

    def failing(self, collection, points, **more):
        assert more["wait"], "a shard counts as uploaded when it is stored"
        if len(sent) == 6:
            raise ValueError("connection reset")
        sent.append(points.ids[0])
        return upsert(self, collection, points, **more)

    monkeypatch.setattr(QdrantClient, "upsert", failing)
    with pytest.raises(
        RetrieverError, match="upload into 'passages' failed .connection reset.; give the same"
    ):
        build_index(corpus, tmp_path / "i", options, progress=False)
    assert sent == [0, 5, 10, 15, 20, 25]
    monkeypatch.setattr(QdrantClient, "upsert", lambda *a, **b: sent.append(a[2].ids[0]) or upsert(*a, **b))
    sent.clear()
    build_index(corpus, tmp_path / "i", options, progress=False)
    assert sent == [20, 25, 30, 35, 40, 45]
    index = open_index(tmp_path / "i", corpus)
    assert [index.search([f"person {n}"], 1)[0][0][0]["id"] for n in (3, 22, 49)] == ["p3", "p22", "p49"]
    assert not list(tmp_path.glob("i.embeddings"))


def test_a_collection_that_is_not_ours_is_left_alone(tmp_path, corpus, encoder):
    upload(tmp_path / "db", corpus, encoder, "passages")
    options = BuildOptions(kind="qdrant", qdrant_url=str(tmp_path / "db"))
    with pytest.raises(RetrieverError, match="has one of this name; .* serve it as it is"):
        build_index(corpus, tmp_path / "i", options, progress=False)


def test_options_of_a_collection():
    options = BuildOptions(
        kind="qdrant", qdrant_shards=6, qdrant_replicas=2, qdrant_on_disk=True, qdrant_quantization="int8"
    )
    settings = uploading.settings_of_collection(768, options)
    assert (settings["shard_number"], settings["replication_factor"]) == (6, 2)
    assert settings["vectors_config"].on_disk and settings["vectors_config"].size == 768
    assert settings["quantization_config"].scalar.type == models.ScalarType.INT8
    plain = uploading.settings_of_collection(768, BuildOptions(kind="qdrant"))
    assert plain["quantization_config"] is None and not plain["vectors_config"].on_disk
    binary = uploading.settings_of_collection(768, BuildOptions(qdrant_quantization="binary"))
    assert binary["quantization_config"].binary.always_ram


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qdrant_shards": 0}, "--qdrant_shards 0: must be 1 or more"),
        ({"qdrant_quantization": "int4"}, "--qdrant_quantization 'int4': choose int8 or binary"),
        ({"search": "nprobe=3"}, "search parameter 'nprobe=3': expected NAME=VALUE with one of hnsw_ef"),
        ({"search": "exact=maybe"}, "search parameter 'exact=maybe'"),
        ({"search": "hnsw_ef=many"}, "search parameter 'hnsw_ef=many'"),
    ],
)
def test_options_that_mean_nothing(tmp_path, corpus, options, message):
    with pytest.raises(RetrieverError, match=message):
        build_index(corpus, tmp_path / "i", BuildOptions(kind="qdrant", **options), progress=False)


def test_search_parameters():
    assert search_params("") is None
    params = search_params("hnsw_ef=128,exact=false,rescore=true,oversampling=2.5")
    assert (params.hnsw_ef, params.exact) == (128, False)
    assert (params.quantization.rescore, params.quantization.oversampling) == (True, 2.5)


def test_search_parameters_reach_the_collection(tmp_path, corpus, encoder, monkeypatch):
    options = upload(tmp_path, corpus, encoder)
    asked, query = [], QdrantClient.query_batch_points

    def noting(self, collection, requests, **more):
        asked.extend(requests)
        return query(self, collection, requests, **more)

    monkeypatch.setattr(QdrantClient, "query_batch_points", noting)
    served = Collection(
        CollectionOptions(str(tmp_path), options.qdrant_collection, "e5", qdrant_search="exact=true")
    )
    served.search(["person 1", "person 2"], 3)
    assert [(one.params.exact, one.limit, one.with_payload) for one in asked] == [(True, 3, True)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--qdrant_url", "u"], "--qdrant_collection is missing"),
        (["--qdrant_url", "u", "--qdrant_collection", "c"], "--retriever_name is missing"),
        (
            ["--qdrant_url", "u", "--qdrant_collection", "c", "--retriever_name", "e5", "--corpus_path", "x"],
            "--corpus_path: has no meaning",
        ),
    ],
)
def test_what_a_collection_needs(arguments, message):
    with pytest.raises(RetrieverError, match=message):
        parse(arguments)
