"""The builder: stopped and started again, refused when its settings changed, never half an index."""

import os
from dataclasses import replace

import numpy as np
import pytest
from retriever_rig import people_corpus

pytest.importorskip("faiss")

from retriever.backends import BuildOptions
from retriever.encoders import HashedEncoder
from retriever.errors import RetrieverError
from retriever.indexes import index as embeddings_module
from retriever.indexes.index import build_index, open_index


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return people_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 30)


class Stopped(Exception):
    pass


@pytest.fixture
def stop_after(monkeypatch):
    """Makes encoding fail after so many passages, and counts those encoded."""
    encode = HashedEncoder.encode_passages
    state = {"encoded": 0, "limit": 10**9}

    def counted(self, rows):
        if state["encoded"] + len(rows) > state["limit"]:
            raise Stopped
        state["encoded"] += len(rows)
        return encode(self, rows)

    monkeypatch.setattr(HashedEncoder, "encode_passages", counted)
    monkeypatch.setattr(embeddings_module, "BLOCK", 4)
    return state


def test_a_stopped_build_goes_on_where_it_was(tmp_path, corpus, stop_after):
    options = BuildOptions(shard_rows=8)
    stop_after["limit"] = 20
    with pytest.raises(Stopped):
        build_index(corpus, tmp_path / "i", options, progress=False)
    assert not (tmp_path / "i").exists()
    assert sum(name.endswith(".npy") for name in os.listdir(tmp_path / "i.embeddings")) == 2
    stop_after.update(encoded=0, limit=10**9)
    build_index(corpus, tmp_path / "i", options, progress=False)
    assert stop_after["encoded"] == 14  # of 30, without the 16 of two complete shards
    build_index(corpus, tmp_path / "whole", progress=False)
    assert (tmp_path / "i/index.faiss").read_bytes() == (tmp_path / "whole/index.faiss").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["i", "whole"]


def test_changed_settings_are_refused(tmp_path, corpus, stop_after):
    stop_after["limit"] = 20
    with pytest.raises(Stopped):
        build_index(corpus, tmp_path / "i", BuildOptions(shard_rows=8), progress=False)
    with pytest.raises(RetrieverError, match=r"other settings \(shard_rows was 8 and is 16\); restore them"):
        build_index(corpus, tmp_path / "i", BuildOptions(shard_rows=16), progress=False)


def test_named_embeddings_serve_several_indexes(tmp_path, corpus, stop_after):
    options = BuildOptions(embeddings=tmp_path / "e")
    build_index(corpus, tmp_path / "flat", options, progress=False)
    assert stop_after["encoded"] == 30
    build_index(corpus, tmp_path / "hnsw", replace(options, factory="HNSW8"), progress=False)
    assert stop_after["encoded"] == 30
    found = [open_index(tmp_path / name, corpus).search(["person 17"], 1) for name in ("flat", "hnsw")]
    assert found[0] == found[1]
    assert found[0][0][0][0]["id"] == "17"


def test_half_precision_shards(tmp_path, corpus):
    options = BuildOptions(embeddings=tmp_path / "e", embedding_dtype="float16")
    build_index(corpus, tmp_path / "i", options, progress=False)
    assert np.load(tmp_path / "e" / "shard-00000.npy").dtype == np.float16
    assert open_index(tmp_path / "i", corpus).search(["person 17"], 1)[0][0][0]["id"] == "17"


@pytest.mark.parametrize(
    ("name", "factory", "options", "message"),
    [
        ("e6", "Flat", {}, "encoder 'e6' is unknown"),
        ("hashed", "Nonsense", {}, "not a FAISS factory string"),
        ("hashed", "Flat", {"kind": "lucene"}, "--kind 'lucene' is unknown"),
        ("hashed", "Flat", {"embedding_dtype": "int8"}, "--embedding_dtype 'int8'"),
        ("hashed", "Flat", {"shard_rows": 0}, "--shard_rows 0"),
        ("hashed", "HNSW8", {"kind": "jax"}, "--factory HNSW8: --kind jax has none"),
        ("hashed", "IVF64,Flat", {}, "cannot be trained on 30 passages"),
        ("bm25", "Flat", {"retriever_model": "x"}, "has no vectors"),
    ],
)
def test_options_that_do_not_fit(tmp_path, corpus, name, factory, options, message):
    with pytest.raises(RetrieverError, match=message):
        build_index(corpus, tmp_path / "i", BuildOptions(name, factory=factory, **options), progress=False)
    assert not (tmp_path / "i").exists()


def test_other_folders_are_left_alone(tmp_path, corpus):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(RetrieverError, match="exists and is not an index"):
        build_index(corpus, tmp_path, progress=False)
    with pytest.raises(RetrieverError, match="holds no embeddings"):
        options = BuildOptions(embeddings=tmp_path)
        build_index(corpus, tmp_path / "i", options, progress=False)
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


def test_a_full_disk_is_refused_before_encoding(tmp_path, corpus, stop_after, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(RetrieverError, match=r"need 491,520 bytes and the disk has 1,000 free"):
        build_index(corpus, tmp_path / "i", progress=False)
    assert stop_after["encoded"] == 0
