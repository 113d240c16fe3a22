"""Encoders without weights: words of each script, and scores of BM25 up to the projection."""

import math
import re

import numpy as np
import pytest
from retriever_rig import TOWNS, write_rows

from retriever.backends import BuildOptions
from retriever.corpus.passages import load_corpus, split_contents
from retriever.encoders import HashedEncoder, cosine, words
from retriever.errors import RetrieverError
from retriever.indexes.index import Index, build_index, embed, open_index


@pytest.mark.parametrize("title", TOWNS)
def test_title_finds_its_own_passage(towns, title):
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
    results = {row["id"]: score for row, score in towns.search(["mayor of port"], 4)[0]}
    found_without_of = {row["id"]: score for row, score in towns.search(["port mayor"], 4)[0]}
    assert max(results, key=results.get) == "2"
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


def test_long_passage_is_discounted_as_in_bm25():
    """One `port` among 2 and among 61 words; twenty others without it make it rare."""
    rows = [{"contents": '""\nport short'}, {"contents": '""\nport ' + " ".join(f"w{n}" for n in range(60))}]
    rows += [{"contents": f'""\nother{n} thing{n}'} for n in range(20)]
    encoder = HashedEncoder.fit(
        rows, dimension=2**15
    )  # wide, so that the projection adds no noise to speak of
    mean = (2 + 61 + 20 * 2) / len(rows)
    short, long = (encoder.encode_passages(rows[:2]) @ encoder.encode_queries(["port"]).T).ravel().tolist()
    expected = [1.9 / (1 + 0.9 * (0.6 + 0.4 * words / mean)) for words in (2, 61)]
    assert long / short == pytest.approx(expected[1] / expected[0], rel=0.1)
    assert expected[1] / expected[0] < 0.5


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


def test_vectors_of_another_word_splitter_are_refused(tmp_path, monkeypatch):
    corpus = load_corpus(write_rows(tmp_path / "corpus.jsonl", [{"id": 1, "contents": "a\nb"}]))
    embed(corpus, tmp_path / "vectors", BuildOptions(), progress=False)
    monkeypatch.setattr("retriever.encoders.WORDS", 3)
    with pytest.raises(RetrieverError, match="other settings .words was 2 and is 3"):
        embed(corpus, tmp_path / "vectors", BuildOptions(), progress=False)
