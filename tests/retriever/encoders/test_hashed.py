"""The encoder without weights: its scores are BM25's, up to the projection."""

import math
import re

import numpy as np
import pytest

pytest.importorskip("faiss")

from retriever_rig import TOWNS

from retriever.corpus.passages import split_contents
from retriever.encoders import HashedEncoder, cosine
from retriever.indexes.index import Index


@pytest.mark.parametrize("title", TOWNS)
def test_a_title_finds_its_own_passage_first(towns, title):
    ((row, _), *_) = towns.search([title], 3)[0]
    assert split_contents(row["contents"])[0] == title


def test_scores_are_bm25_up_to_the_projection(towns):
    """Ordering and size agree with BM25 computed from its definition."""
    texts = [f"{t} {t} {x}" for t, x in TOWNS.items()]
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, words)) / len(words)
    query = ["port", "mayor"]
    expected = []
    for passage in words:
        score = 0.0
        for term in query:
            frequency = sum(term in other for other in words)
            idf = math.log1p((len(words) - frequency + 0.5) / (frequency + 0.5))
            count = passage.count(term)
            score += idf * count * 1.9 / (count + 0.9 * (0.6 + 0.4 * len(passage) / mean))
        expected.append(score)
    found = {row["id"]: score for row, score in towns.search(["mayor of port"], 4)[0]}
    found_without_of = {row["id"]: score for row, score in towns.search(["port mayor"], 4)[0]}
    assert max(found, key=found.get) == "2"
    for number, score in enumerate(expected):
        assert found_without_of.get(str(number), 0.0) == pytest.approx(score, abs=0.2)


def test_query_without_a_known_word_finds_nothing(towns):
    assert towns.search(["", "🎈", "\0", "!!!", "zzzz", "adar"], 2) == [[]] * 6


def test_passages_beyond_the_noise_are_found():
    """The projection ranks passages without a word of the query before one that has it."""

    class Ranked:
        documents = 20

        def rank(self, queries, k):
            return np.linspace(2, 0.1, k)[None], np.arange(k)[None]

    rows = [{"id": str(n), "contents": f'"t{n}"\nword{n}'} for n in range(20)]
    index = Index(rows, Ranked(), {"encoder": "hashed"})
    assert [row["id"] for row, _ in index.search(["word15 word16 WORD18"], 2)[0]] == ["15", "16"]


def test_hit_of_the_hashed_encoder_scores_above_zero():
    class Ranked:
        documents = 2

        def rank(self, queries, k):
            return np.array([[0.0, -0.5]]), np.array([[0, 1]])

    rows = [{"id": str(n), "contents": f'"t{n}"\nword'} for n in range(2)]
    assert Index(rows, Ranked(), {"encoder": "hashed"}).search(["word"], 2) == [[]]
    assert len(Index(rows, Ranked(), {"encoder": "e5"}).search(["zzzz"], 2)[0]) == 2  # cosines


def test_hashed_state_is_kept(tmp_path, towns):
    encoder = HashedEncoder.fit(towns.corpus)
    encoder.save(tmp_path)
    again = HashedEncoder.load(tmp_path)
    np.testing.assert_array_equal(again.encode_queries(["limmat"]), encoder.encode_queries(["limmat"]))
    assert cosine(encoder.encode_queries(["limmat"])[0], encoder.encode_passages(towns.corpus[3:4])[0]) > 0.1
