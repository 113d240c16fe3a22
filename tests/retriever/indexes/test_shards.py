"""An index is the same, however many shards its vectors were kept in."""

import numpy as np
import pytest
from retriever_rig import people_corpus

pytest.importorskip("faiss")

from retriever.backends import BuildOptions
from retriever.contrib import qdrant
from retriever.encoders import HashedEncoder
from retriever.errors import RetrieverError
from retriever.indexes.index import build_index, embed, open_index

QUERIES = ["person 3 lives in town 3", "person 16", "town 5", "person 22 lives"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return people_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 23)


def found(folder, corpus):
    return [
        [(row["id"], round(score, 3)) for row, score in one]
        for one in open_index(folder, corpus).search(QUERIES, 5)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "faiss",
        pytest.param("jax", marks=pytest.mark.medium),
        pytest.param("qdrant", marks=pytest.mark.medium),
    ],
)
def test_every_kind_finds_the_same_in_many_shards(tmp_path, corpus, monkeypatch, kind):
    if kind == "qdrant":
        pytest.importorskip("qdrant_client")
        monkeypatch.setattr(qdrant, "BATCH", 2)  # several uploads a shard, too
    build_index(corpus, tmp_path / "one", BuildOptions(), progress=False)
    build_index(corpus, tmp_path / "many", BuildOptions(kind=kind, shard_rows=5), progress=False)
    expected = found(tmp_path / "one", corpus)
    assert [one[0][0] for one in expected[:2]] == ["3", "16"]
    assert found(tmp_path / "many", corpus) == expected


def test_shards_and_samples_are_rows_of_the_corpus_in_its_order(tmp_path, corpus):
    embeddings = embed(corpus, tmp_path / "vectors", BuildOptions(shard_rows=5), progress=False)
    assert [len(shard) for shard in embeddings.shards()] == [5, 5, 5, 5, 3]
    whole = np.concatenate(list(embeddings.shards()))
    expected = embeddings.encoder.encode_passages(corpus[:])
    np.testing.assert_allclose(whole, expected, rtol=1e-6)
    for count in (1, 3, 7, 10, 22, 23, 100):
        step = -(-23 // count)
        np.testing.assert_allclose(embeddings.sample(count), expected[::step], rtol=1e-6)


def test_the_mean_length_counts_every_word():
    """A word that stands twice in a passage makes it longer by two."""
    rows = [{"id": "0", "contents": '"a"\nb b b c'}, {"id": "1", "contents": '"d"\ne'}]
    assert HashedEncoder.fit(rows, dimension=8)._mean_length == (2 + 4 + 2 + 1) / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_dtype": "float32"}, "dtype was 'float16' and is 'float32'"),
        ({"shard_rows": 6}, "shard_rows was 5 and is 6"),
        ({"retriever_name": "bm25"}, "encoder was 'hashed' and is 'bm25'"),
        ({"retriever_model": "other"}, "model was .* and is 'other'"),
    ],
)
def test_shards_of_other_settings_are_refused(tmp_path, corpus, changes, message):
    begun = {"shard_rows": 5, "embedding_dtype": "float16"}
    embed(corpus, tmp_path, BuildOptions(**begun), progress=False)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RetrieverError, match=message):
        embed(corpus, tmp_path, BuildOptions(**begun | changes), progress=False)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_missing_shard_is_encoded_again(tmp_path, corpus):
    options = BuildOptions(shard_rows=5, embedding_dtype="float16")
    embed(corpus, tmp_path, options, progress=False)
    shards = sorted(tmp_path.glob("*.npy"))
    before = [path.read_bytes() for path in shards]
    shards[2].unlink()
    again = embed(corpus, tmp_path, options, progress=False)
    assert [path.read_bytes() for path in shards] == before
    assert {shard.dtype for shard in again.shards()} == {np.dtype(np.float16)}
