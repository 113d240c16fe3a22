"""Words of scripts with and without spaces between them."""

import pytest
from retriever_rig import write_rows

pytest.importorskip("faiss")

from retriever.backends import BuildOptions
from retriever.corpus.passages import load_corpus
from retriever.encoders import words
from retriever.errors import RetrieverError
from retriever.indexes.index import build_index, embed, open_index

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
    found = index.search([query for _, query in PASSAGES.values()], 1)
    assert [[row["id"] for row, _ in hits] for hits in found] == [[key] for key in PASSAGES]
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
