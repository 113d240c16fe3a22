"""Encoders without weights: words of each script, and scores of BM25 up to the projection."""

import re

import numpy as np
import pytest
from retriever_rig import TOWNS, bm25_scores

from retriever.corpus.passages import split_contents
from retriever.encoders.hashed import HashedEncoder
from retriever.encoders.tokenizer import tokenize
from retriever.indexes.index import Index


def test_scores_are_bm25_up_to_the_projection():
    """Of titles that count twice; in so many dimensions the projection adds no noise to speak of."""
    contents = [f'"{title}"\n{text}' for title, text in TOWNS.items()]
    contents += [f'"other{n}"\nthing{n}' + " port" * (n < 5) + " far" * 9 * n for n in range(20)]
    rows = [{"contents": text} for text in contents]
    texts = [re.findall(r"\w+", "{0} {0} {1}".format(*split_contents(text)).lower()) for text in contents]
    encoder = HashedEncoder.fit(rows, dimension=2**15)
    scores = encoder.encode_passages(rows) @ encoder.encode_queries(["port Mayor port"])[0]
    expected = 1.9 * bm25_scores(["port", "mayor"], texts)
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("title", TOWNS)
def test_title_finds_its_own_passage_first(towns, title):
    ((first, _), *_) = towns.search([title], 3)[0]
    assert split_contents(first["contents"])[0] == title


def test_saved_encoder_makes_the_same_vectors(tmp_path, towns):
    encoder = HashedEncoder.fit(towns.corpus)
    encoder.save(tmp_path)
    loaded = HashedEncoder.load(tmp_path)
    queries = ["limmat", "port mayor"]
    np.testing.assert_array_equal(loaded.encode_queries(queries), encoder.encode_queries(queries))
    rows = towns.corpus[:]
    np.testing.assert_array_equal(loaded.encode_passages(rows), encoder.encode_passages(rows))


def test_query_without_a_known_word_finds_nothing(towns):
    assert towns.search(["", "🎈", "\0", "!!!", "zzzz", "adar"], 2) == [[]] * 6


class Ranked:
    """Gives these scores to the passages in their order."""

    def __init__(self, scores):
        self.scores, self.documents = np.array([scores]), len(scores)

    def rank(self, queries, k):
        return self.scores[:, :k], np.arange(k)[None]


def test_passages_beyond_the_noise_are_found():
    """The projection ranks passages without a word of the query before one that has it, and below zero."""
    rows = [{"id": str(n), "contents": f'"t{n}"\nword{n}'} for n in range(20)]
    index = Index(rows, Ranked(np.linspace(2, 0.1, 20)), {"encoder": "hashed"})
    assert [row["id"] for row, _ in index.search(["word15 word16 WORD18"], 2)[0]] == ["15", "16"]
    noise = Ranked([0.0, -0.5])
    assert Index(rows[:2], noise, {"encoder": "hashed"}).search(["word0 word1"], 2) == [[]]
    assert len(Index(rows[:2], noise, {"encoder": "e5"}).search(["zzzz"], 2)[0]) == 2  # cosines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The_1st naïve Straße, x² e\u0301t ﬁn!", ["the_1st", "naïve", "straße", "x²", "e", "t", "ﬁn"]),
        ("Хлеб und Ψωμί", ["хлеб", "und", "ψωμί"]),
        ("东京2020", ["东", "京", "东京", "2020"]),
        ("山", ["山"]),
        ("は", ["は"]),
        ("かな漢字", ["漢", "字", "かな", "な漢", "漢字"]),
        ("ｶﾞＡ１", ["ガ", "a1"]),
        ("\u1112\u1161\u11ab글", ["한", "글", "한글"]),
        ("물은", ["물", "은", "물은"]),
        ("ไทย", ["ไท", "ทย"]),
        ("น้ำ", ["น้", "น้ำ"]),
        ("ភ្នំពេញ", ["ភ្នំ", "ពេ", "ភ្នំពេ", "ពេញ"]),
        ("ລາວ", ["ລາ", "າວ"]),
        ("བོད་ཀྱི", ["བོ", "བོད", "ཀྱི"]),
        ("မြန်မာ", ["မြ", "န်", "မာ", "မြန်", "န်မာ"]),
        ("ไท\u200bย a\u200bb", ["ไท", "ทย", "a", "b"]),
        ("๒๕๔๐ ฿", ["๒๕๔๐"]),
    ],
)
def test_words_of_each_script(text, expected):
    assert tokenize(text) == expected
