"""Opening an index of each kind: results of a brute-force search, and refusals."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import faiss
import numpy as np
import pytest
from retriever_rig import brute_force_ids, ids, refuses, write_rows

from retriever.backends import BuildOptions, IndexOptions
from retriever.corpus.passages import load_corpus
from retriever.encoders import HashedEncoder
from retriever.indexes.backend import MANIFEST
from retriever.indexes.index import Index, build_index, open_index

PEOPLE = ["adara almson", "brulen falkski", "cirel domson", "elgar berkson"]
ROWS = [{"id": str(number)} for number in range(4)]


def make_corpus(path, count=40):
    rows = [
        {"id": f"p{i}", "contents": f'"{PEOPLE[i % 4]} {i}"\nlives in town number {i // 3}.', "url": f"u{i}"}
        for i in range(count)
    ]
    return load_corpus(write_rows(path, rows))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="module")
def hashed(corpus):
    build_index(corpus, corpus.path.parent / "hashed", progress=False)
    return corpus.path.parent / "hashed"


@pytest.fixture(scope="module")
def bm25(corpus):
    pytest.importorskip("bm25s")
    build_index(corpus, corpus.path.parent / "bm25", BuildOptions("bm25"), progress=False)
    return corpus.path.parent / "bm25"


@pytest.fixture
def copy(hashed, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(hashed, tmp_path / "copy"))


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"engine": "jax"}, {"retriever_name": "hashed"}])
def test_every_engine_finds_rows_of_brute_force_ids(hashed, corpus, options):
    index = open_index(hashed, corpus, IndexOptions(**options))
    queries = ["cirel domson 2", "elgar in town number 3", "town"]
    assert ids(index.search(queries, 7)) == brute_force_ids(HashedEncoder.load(hashed), corpus, queries, 7)
    assert index.manifest["documents"] == 40
    assert index.manifest["kind"] == options.get("engine", "faiss")
    json.dumps(index.manifest)
    assert index.search([], 3) == []
    assert len(index.search(["cirel"], 1000)[0]) == 10
    assert index.search(["zzzz", "", "!!!"], 3) == [[]] * 3
    (ranked,) = brute_force_ids(HashedEncoder.load(hashed), corpus, ["zzzz cirel"], 40)
    assert ids(index.search(["zzzz cirel"], 40)) == [[name for name in ranked if int(name[1:]) % 4 == 2]]


@pytest.mark.parametrize("mmap", [False, True])
def test_bm25_is_its_definition(bm25, corpus, mmap):
    texts = [re.findall(r"\w+", row["contents"].lower()) for row in corpus]
    mean = sum(map(len, texts)) / len(texts)

    def score(terms, text):
        total = 0.0
        for term in terms:
            frequency = sum(term in other for other in texts)
            idf = math.log1p((len(texts) - frequency + 0.5) / (frequency + 0.5))
            count = text.count(term)
            total += idf * count / (count + 0.9 * (0.6 + 0.4 * len(text) / mean))
        return total

    index = open_index(bm25, corpus, IndexOptions("bm25", mmap=mmap))
    terms = ["cirel", "town", "7"]
    expected = np.array([score(terms, text) for text in texts])
    (results,) = index.search(["Cirel, of town 7!"], 10)
    order = np.argsort(-expected.round(5), kind="stable")[:10]
    assert [row["id"] for row, _ in results] == [f"p{i}" for i in order]
    np.testing.assert_allclose([score for _, score in results], expected[order], rtol=1e-4)
    assert index.search(["zzzz", "", "!!!"], 3) == [[]] * 3
    assert ids(index.search(["zzzz 39", "town"], 3)) == [["p39"], ["p0", "p1", "p2"]]


def test_damaged_or_too_large_bm25_is_refused(bm25, tmp_path, corpus, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("retriever.indexes.backend.available_memory", lambda: 10)
        refuses("bm25: needs .* are available; serve it with --mmap", open_index, bm25, corpus)
        assert open_index(bm25, corpus, IndexOptions(mmap=True)).search(["cirel"], 1)[0]
        options = (tmp_path / "i", BuildOptions("bm25"))
        refuses("BM25: needs .*; use --retriever_name hashed", build_index, corpus, *options)
    copy = Path(shutil.copytree(bm25, tmp_path / "copy"))
    data = copy / "bm25" / "data.csc.index.npy"
    data.write_bytes(data.read_bytes()[:-10])
    for message in ("data.csc.index.npy: damaged", r"bm25/.*: cannot be read \(No such file"):
        refuses(message, open_index, copy, corpus)
        refuses("bm25: not a whole BM25 index", open_index, copy, corpus, IndexOptions(skip_checksum=True))
        shutil.rmtree(copy / "bm25", ignore_errors=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *[("encoder.npz", text, "cannot be read .*build") for text in (None, b"", b"PK damaged")],
        ("index.faiss", None, "no such index"),
        ("index.faiss", b"IxFI", "has 4 bytes and its manifest says 655,405; build it again"),
        *[(MANIFEST, text, ".*build it again") for text in (b"{", b"[]", b"{}", b'{"kind": "x"}')],
    ],
)
def test_missing_or_damaged_file_is_refused(copy, corpus, name, content, message):
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    refuses(f"{name}: {message}", open_index, copy, corpus)


def test_older_index_loads_unless_words_were_split_otherwise(copy, corpus):
    manifest = json.loads((copy / MANIFEST).read_text())
    old = {key: manifest[key] for key in ("corpus_sha256", "documents", "encoder", "factory", "words")}
    (copy / MANIFEST).write_text(json.dumps(old))
    assert ids(open_index(copy, corpus).search(["cirel domson 2"], 1)) == [["p2"]]
    assert manifest.pop("words") == 2
    for words in ({}, {"words": 1}, {"words": 3}):
        (copy / MANIFEST).write_text(json.dumps(manifest | words))
        refuses("split into words by another version .*build it again with", open_index, copy, corpus)


def test_sizes_of_index_corpus_and_encoder_must_agree(hashed, copy, corpus, tmp_path):
    fewer = make_corpus(tmp_path / "c.jsonl", 39)
    refuses(r"built from another corpus \(40 passages; this one has 39\)", open_index, hashed, fewer)
    for count, dimension, message in (
        (39, 4096, "holds 39 vectors and the corpus .* 40 passages"),
        (40, 8, "holds vectors of dimension 8, and hashed makes 4096"),
    ):
        index = faiss.IndexFlatIP(dimension)
        index.add(np.ones((count, dimension), np.float32))
        faiss.write_index(index, str(copy / "index.faiss"))
        manifest = json.loads((copy / MANIFEST).read_text())
        manifest["bytes"] = (copy / "index.faiss").stat().st_size
        (copy / MANIFEST).write_text(json.dumps(manifest))
        refuses(message, open_index, copy, corpus)


def test_unsuitable_option_or_missing_index_is_named(hashed, tmp_path, corpus):
    for options, message in (
        ({"retriever_name": "e5"}, "--retriever_name: .* was built with hashed"),
        ({"engine": "tpu"}, "--engine 'tpu' is unknown"),
        ({"engine": "jax", "faiss_gpu": True}, "--faiss_gpu: has no meaning for an index of kind jax"),
        ({"retriever_model": "m"}, "--retriever_model m: hashed has no model"),
    ):
        refuses(message, open_index, hashed, corpus, IndexOptions(**options))
    refuses("no complete index; build it", open_index, tmp_path / "none", corpus)
    for name in ("", "hashed", "bm25"):
        refuses("set --retriever_name to e5", open_index, hashed / "index.faiss", corpus, IndexOptions(name))


def test_missing_neighbours_are_left_out():
    """A ranker that finds row 2 for every query, and fewer than it is asked for."""

    def rank(queries, k):
        assert k <= len(ROWS)
        scores, rows = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1)
        scores[:, 0], rows[:, 0] = 0.5, 2
        return scores, rows

    index = Index(ROWS, SimpleNamespace(rank=rank), {})
    assert index.search(["a", "b"], 3) == index.search(["a", "b"], 9) == [[(ROWS[2], 0.5)]] * 2
