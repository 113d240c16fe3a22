"""Qdrant in the client's embedded mode: payloads, existing collections, stopped uploads, options."""

import socket
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from unittest.mock import Mock

import pytest

pytest.importorskip("qdrant_client")

from fastapi.testclient import TestClient
from qdrant_client import QdrantClient, models
from retriever_rig import brute_force_ids, ids, people_corpus, refuses

from retriever.backends import KINDS, BuildOptions
from retriever.contrib import qdrant
from retriever.contrib.qdrant import Collection, search_params
from retriever.encoders.hashed import HashedEncoder
from retriever.indexes.build import build_index
from retriever.indexes.index import open_index
from retriever.options import parse
from retriever.service.assembly import load, load_index

RLINF = "wiki_collection_m24_cef512"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return people_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 50)


@pytest.fixture
def encoder(corpus, monkeypatch):
    """An encoder of 4,096 dimensions in place of a model, as a collection needs one."""
    hashed = HashedEncoder.fit(corpus)
    monkeypatch.setattr(qdrant, "make_encoder", lambda name, model, rows: hashed)
    return hashed


def options_for(folder, **more):
    settings = {name: more.pop(name) for name in list(more) if name.startswith("qdrant_")}
    return BuildOptions(kind="qdrant", settings={"qdrant_url": str(folder / "db")} | settings, **more)


def collection_at(folder, name, *more):
    arguments = ["--qdrant_url", str(folder), "--qdrant_collection", name, "--retriever_name", "e5"]
    return Collection(parse([*arguments, *more]))


def upload(folder, corpus, encoder, collection=RLINF, **payload):
    """As RLinf's script: ids are row numbers, cosine, the corpus row as payload."""
    client = QdrantClient(path=str(folder))
    size = models.VectorParams(size=encoder.dimension, distance=models.Distance.COSINE)
    client.create_collection(collection, size, hnsw_config=models.HnswConfigDiff(m=24, ef_construct=512))
    vectors, payloads = encoder.encode_passages(corpus[:]).tolist(), [payload or row for row in corpus]
    client.upsert(collection, models.Batch(ids=list(range(len(corpus))), vectors=vectors, payloads=payloads))
    client.close()


def test_index_finds_rows_of_brute_force(tmp_path, corpus):
    build_index(corpus, tmp_path / "q", BuildOptions(kind="qdrant"), progress=False)
    index = open_index(tmp_path / "q", corpus)
    queries = ["person 17 lives", "town 3"]
    hits = index.search(queries, 5)
    assert ids(hits) == brute_force_ids(HashedEncoder.load(tmp_path / "q"), corpus, queries, 5)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: index.search(queries, 5), range(16))) == [hits] * 16
    refuses("open in another process", open_index, tmp_path / "q", corpus)


def test_absent_server_and_foreign_collection_are_refused(tmp_path, corpus, encoder):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
    upload(tmp_path / "db", corpus, encoder, "passages")
    for options, message in (
        (options_for(tmp_path, qdrant_url=url), f"{url}: no answer"),
        (options_for(tmp_path), "--qdrant_collection passages: exists in .*; choose another, or serve it"),
    ):
        refuses(message, build_index, corpus, tmp_path / "i", options, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["db"]  # nothing was encoded


def test_rlinf_collection_is_served_unchanged(tmp_path, corpus, encoder, monkeypatch):
    upload(tmp_path, corpus, encoder)
    requests, query = [], QdrantClient.query_batch_points

    def noting(self, collection, batch, **more):
        requests.extend(batch)
        return query(self, collection, batch, **more)

    monkeypatch.setattr(QdrantClient, "query_batch_points", noting)
    arguments = ["--qdrant_url", str(tmp_path), "--qdrant_collection", RLINF, "--retriever_name", "e5"]
    with TestClient(load(parse([*arguments, "--qdrant_search", "exact=true"]))) as client:
        body = {"queries": ["person 17", "person 3"], "topk": 2}
        lists = client.post("/retrieve", json=body).json()["result"]
        assert [rows[0] for rows in lists] == [corpus[17], corpus[3]]
        assert [len(rows) for rows in lists] == [2, 2]
        sent = [(request.params.exact, request.limit, request.with_payload) for request in requests]
        assert sent == [(True, 2, True)] * 2
        state = client.get("/health").json()
        names = ("kind", "documents", "encoder", "search")
        assert [state[name] for name in names] == ["qdrant", 50, "hashed", "exact=true"]
        monkeypatch.setattr(QdrantClient, "query_batch_points", Mock(side_effect=ValueError("gone")))
        reply = client.post("/retrieve", json=body)
        assert reply.status_code == 503 and "no answer (gone); is the server up" in reply.json()["error"]


def test_unsuitable_collection_or_encoder_is_refused(tmp_path, corpus, encoder, monkeypatch):
    def check(message, collection=RLINF, name="e5", used=encoder):
        monkeypatch.setattr(qdrant, "make_encoder", lambda *_: used)
        refuses(message, collection_at, tmp_path, collection, "--retriever_name", name)

    upload(tmp_path, corpus, encoder)
    upload(tmp_path, corpus, encoder, "texts", text="a text without a number", page=7)
    client, dot = QdrantClient(path=str(tmp_path)), models.Distance.DOT
    client.create_collection("far", models.VectorParams(size=4, distance=models.Distance.EUCLID))
    client.create_collection("named", {"a": models.VectorParams(size=4, distance=dot)})
    client.create_collection("empty", models.VectorParams(size=4096, distance=dot))
    client.close()
    other = HashedEncoder.fit(corpus)
    other._projection = -other._projection
    check(r"point 0 has no text in 'contents' \(it has text, page\); set --qdrant_text", "texts")
    check("its distance is Euclid", "far")
    check(r"has named vectors \(a\)", "named")
    check("is empty; upload into it first", "empty")
    check("collection 'none': cannot be opened", "none")
    check("--retriever_name hashed: needs --index_path; or name e5, bge or dense", name="hashed")
    check("holds vectors of dimension 4096, and .* makes 64", used=HashedEncoder.fit(corpus, 64))
    check(r"point 0: its vector is not what .*\(cosine -", used=other)


@pytest.mark.filterwarnings("ignore:Local mode performs exact")
def test_build_uploads_rows_as_payload(tmp_path, corpus, encoder, monkeypatch):
    """The embedded mode stands in for the server; the collection also serves without corpus and index."""
    server = Mock(wraps=QdrantClient(path=str(tmp_path / "db")), close=Mock())
    client = Mock(return_value=server)
    monkeypatch.setattr(qdrant, "QdrantClient", client)
    monkeypatch.setenv("QDRANT_API_KEY", "secret")
    settings = {"qdrant_url": "http://h:6333", "qdrant_quantization": "int8", "qdrant_on_disk": True}
    options = BuildOptions(kind="qdrant", settings=settings, shard_rows=20, search="hnsw_ef=64")
    build_index(corpus, tmp_path / "i", options, progress=False)
    client.assert_called_with(url="http://h:6333", api_key="secret", timeout=qdrant.TIMEOUT)
    made = server.create_collection.call_args
    assert made.args[1].on_disk and made.kwargs["quantization_config"].scalar.type == "int8"
    assert {*qdrant.QUANTIZATION} == {*KINDS["qdrant"].build_options["qdrant_quantization"].choices}
    index = open_index(tmp_path / "i", corpus)
    assert index.search(["person 17"], 1)[0][0][0] == corpus[17] and index.manifest["factory"] == "qdrant"
    assert [request.params.hnsw_ef for request in server.query_batch_points.call_args.args[1]] == [64]
    paths = ["--corpus_path", str(corpus.path), "--index_path", str(tmp_path / "i")]
    refuses("--mmap: has no meaning for an index of kind qdrant", load, parse([*paths, "--mmap"]))
    index = load_index(parse([*paths, "--qdrant_search", "exact=true"]), print)
    assert index.manifest["search"] == "exact=true"  # the option wins over the manifest
    collection = collection_at("http://h:6333", "passages")
    assert collection.search(["person 17"], 1)[0][0][0] == corpus[17]


def test_collection_is_plain_by_default(tmp_path, corpus, monkeypatch):
    create = Mock(side_effect=QdrantClient.create_collection)
    monkeypatch.setattr(QdrantClient, "create_collection", lambda *args, **more: create(*args, **more))
    build_index(corpus, tmp_path / "i", options_for(tmp_path), progress=False)
    _client, _name, vectors = create.call_args.args
    assert vectors.size == 4096
    assert not vectors.on_disk
    assert create.call_args.kwargs["quantization_config"] is None


@pytest.mark.parametrize("place", [{}, {"qdrant_url": ""}], ids=["kept", "gone with the index's folder"])
def test_stopped_upload_continues_by_shards(tmp_path, corpus, monkeypatch, place):
    monkeypatch.setattr(qdrant, "BATCH", 5)
    upsert, sent = QdrantClient.upsert, []

    def failing(self, collection, points, **more):
        assert more["wait"], "a shard counts as uploaded when it is stored"
        if len(sent) == 6:
            raise ValueError("connection reset")
        sent.append(points.ids[0])
        return upsert(self, collection, points, **more)

    monkeypatch.setattr(QdrantClient, "upsert", failing)
    build = [build_index, corpus, tmp_path / "i", options_for(tmp_path, shard_rows=20, **place), False]
    refuses("upload into 'passages' failed.*again .connection reset", *build)
    assert sent == [0, 5, 10, 15, 20, 25]
    monkeypatch.setattr(QdrantClient, "upsert", lambda *a, **b: sent.append(a[2].ids[0]) or upsert(*a, **b))
    sent.clear()
    build[0](*build[1:])
    assert sent == [*range(0 if place else 20, 50, 5)]
    index = open_index(tmp_path / "i", corpus)
    assert ids(index.search([f"person {n}" for n in (3, 22, 49)], 1)) == [["3"], ["22"], ["49"]]
    assert not list(tmp_path.glob("i.embeddings"))


def test_invalid_options_are_named(tmp_path, corpus):
    for options, message in (
        ({"qdrant_quantization": "int4"}, "--qdrant_quantization 'int4': choose from .*int8"),
        ({"search": "nprobe=3"}, "search parameters 'nprobe=3': .* hnsw_ef"),
        ({"search": "hnsw_ef=many"}, "search parameters 'hnsw_ef=many'"),
        ({"search": "exact"}, "search parameters 'exact'"),
        ({"search": "exact=maybe"}, "search parameters 'exact=maybe'"),
        ({"factory": "HNSW8"}, "--factory HNSW8: --kind qdrant"),
    ):
        changed = options_for(tmp_path, **options)
        refuses(message, build_index, corpus, tmp_path / "i", changed, progress=False)
    for more, message in (
        (["--mmap"], "--mmap: has no meaning for .*; leave it out"),
        (["--faiss_gpu"], "--faiss_gpu: has no meaning"),
        (["--engine", "jax"], "--engine: has no meaning"),
        (["--skip_checksum"], "--skip_checksum: has no meaning"),
        (["--corpus_path", "x"], "--corpus_path: has no meaning for .*; leave it out"),
        (["--web_budget", "3"], "--web_budget: has no meaning for .*; leave it out"),
        (["--search", "hnsw_ef=64"], "--search: only a build takes it; leave it out"),
        (["--retriever_name", ""], "--retriever_name is missing"),
        (["--qdrant_collection", ""], "--qdrant_collection is missing"),
    ):
        refuses(message, collection_at, "u", "c", *more)


def test_search_parameters_are_parsed():
    assert search_params("") is None
    params = search_params("hnsw_ef=128,exact=false,rescore=true,oversampling=2.5")
    expected = {"hnsw_ef": 128, "exact": False, "quantization": {"rescore": True, "oversampling": 2.5}}
    assert params.model_dump(exclude_unset=True) == expected


@pytest.mark.parametrize(
    ("proxy", "words"), [("socks5://h:1", "pip install 'httpx"), ("socks://h:1", "scheme")]
)
def test_unusable_proxy_is_named_without_its_value(monkeypatch, proxy, words):
    if "socks5" in proxy and find_spec("socksio"):
        pytest.skip("SOCKS proxies are usable here")
    monkeypatch.setenv("ALL_PROXY", proxy.replace("h:1", "me:secret@h:1"))
    refuses(f"^ALL_PROXY: the proxy cannot be used .*{words}", qdrant.connect, None, "http://127.0.0.1:1")
