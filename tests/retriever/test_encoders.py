"""Encoders without weights: words of each script, and scores of BM25 up to the projection."""

import re

import numpy as np
import pytest
from retriever_rig import TOWNS, bm25_scores, write_rows

from retriever.backends import BuildOptions
from retriever.corpus.passages import load_corpus, split_contents
from retriever.encoders import HashedEncoder, words
from retriever.indexes.index import Index, build_index, open_index

PASSAGES = {  # id -> contents, a query that its passage alone matches
    "zh": ("北京大学\n北京大学位于北京市海淀区，创办于1898年。", "北京大学在哪个区？"),
    "ja": ("富士山\n富士山は静岡県と山梨県にまたがる活火山である。", "静岡にある火山は？"),
    "kana": ("ラーメン\nおいしいラーメンのつくりかた", "ﾗｰﾒﾝ"),
    "ko": ("서울특별시\n서울은 한강에 있는 도시이다.", "서울의 도시"),
    "th": ("กรุงเทพมหานคร\nกรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย", "เมืองหลวงของไทย"),
    "lo": ("ວຽງຈັນ\nວຽງຈັນເປັນນະຄອນຫຼວງຂອງລາວ", "ນະຄອນຫຼວງ"),
    "km": ("ភ្នំពេញ\nភ្នំពេញជារាជធានីនៃកម្ពុជា", "រាជធានី"),
    "my": ("ရန်ကုန်\nရန်ကုန်မြို့သည်မြန်မာနိုင်ငံတွင်ရှိသည်", "မြန်မာနိုင်ငံ"),
    "bo": ("ལྷ་ས\nལྷ་ས་ནི་བོད་ཀྱི་རྒྱལ་ས་ཡིན།", "བོད་ཀྱི་རྒྱལ་ས"),
    "mixed": ("iPhone手机\n苹果公司的iPhone手机售价ＡＢＣ９９", "abc99"),
    "en": ("Zürich\nZürich is a city on the Limmat.", "LIMMAT"),
}


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


@pytest.mark.parametrize("name", ["hashed", "bm25"])
def test_every_script_finds_its_passage(tmp_path, name):
    rows = [{"id": key, "contents": contents} for key, (contents, _) in PASSAGES.items()]
    corpus = load_corpus(write_rows(tmp_path / "corpus.jsonl", rows))
    build_index(corpus, tmp_path / "index", BuildOptions(name), progress=False)
    index = open_index(tmp_path / "index", corpus)
    results = index.search([query for _, query in PASSAGES.values()], 1)
    assert [[row["id"] for row, _ in hits] for hits in results] == [[key] for key in PASSAGES]
    assert index.search(["哪里？", "ぬ", "밥", "!!!", "។"], 3) == [[]] * 5


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
        ("ไท\u200bย a\u200bb", ["ไท", "ทย", "a", "b"]),
        ("๒๕๔๐ ฿", ["๒๕๔๐"]),
    ],
)
def test_words_of_each_script(text, expected):
    assert words(text) == expected
