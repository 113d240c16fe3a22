"""What BM25 counts, and its constants: for the sparse index and for the hashed encoder."""

from __future__ import annotations

import re
from itertools import pairwise
from unicodedata import category, normalize

K1, B = 0.9, 0.4  # Pyserini's defaults for Wikipedia passages
WORDS = 2  # version of `words`: an index and its queries must be split alike
LEXICAL = ("hashed", "bm25")  # values of --retriever_name that count words

_SYLLABIC = (  # one character is a syllable or more: Han, Yi, Hangul
    "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua48c\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
_ALPHABETIC = (
    "\u3041-\u3096\u3099\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # kana
    "\u3105-\u312f\u31a0-\u31bf"  # Bopomofo
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e80-\u0ecf\u0edc-\u0edf"  # Thai, Lao
    "\u0f40-\u0f84\u0f86-\u0fbc\u1000-\u103f\u1050-\u108f\u109a-\u109d"  # Tibetan, Burmese
    "\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa76\uaa7a-\uaa7f"  # Burmese, extended
    "\u1780-\u17d3\u17d7\u17dc\u17dd"  # Khmer
    "\u1950-\u19c9\u1a20-\u1a7c\u1b00-\u1b4c\ua980-\ua9c0"  # Tai, Balinese, Javanese
)
_LETTER = f"[{_SYLLABIC}{_ALPHABETIC}]"  # of a script without spaces between words
_JOINER = "[\u200b-\u200d\u2060]"  # invisible; says where a line may break, or may not
_VARIANTS = "[\u1100-\u11ff\u2e80-\u2fdf\u3040-\u30ff\uf900-\ufaff\uff00-\uffef]+"  # of width, or decomposed
_SIGNS = map(chr, (*range(0xE00, 0x1C00), *range(0x3099, 0x309B), *range(0xA980, 0xAB00)))
_MARKS = "".join(sign for sign in _SIGNS if category(sign)[0] == "M")
_RUN = re.compile(rf"({_LETTER}(?:{_JOINER}*{_LETTER})*)|(?:(?!{_LETTER})\w)+")
# A character with the marks that belong to it, and what stands below it in Burmese and Khmer.
_UNIT = re.compile(f".(?:[{_MARKS}]|(?<=[\u1039\u17d2]).)*")


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits, without stemming and stop words.

    Scripts that are written without spaces, and Korean, whose particles follow without one, give pairs of
    neighbouring characters, and each character that is a syllable or more.
    """
    text = text.lower()
    if not text.isascii():
        text = re.sub(_VARIANTS, lambda found: normalize("NFKC", found[0]), text)
    if text.isascii() or not re.search(_LETTER, text):
        return re.findall(r"\w+", text)
    return [word for run in _RUN.finditer(text) for word in (_grams(run[1]) if run[1] else [run[0]])]


def words_version(retriever_name: str) -> dict[str, int]:
    """Return what a manifest says of `words`; empty for an encoder that counts none."""
    return {"words": WORDS} if retriever_name in LEXICAL else {}


def _grams(run: str) -> list[str]:
    units = _UNIT.findall(re.sub(_JOINER, "", run))
    alone = [unit for unit in units if len(units) == 1 or len(unit) > 1 or re.match(f"[{_SYLLABIC}]", unit)]
    return alone + [first + second for first, second in pairwise(units)]
