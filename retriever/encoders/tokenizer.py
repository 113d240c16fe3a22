"""Splits texts of every script into the words that BM25 and the hashed encoder count."""

from __future__ import annotations

import re
from itertools import pairwise
from unicodedata import category, normalize

from retriever.backends import LEXICAL

# Version of `tokenize`, kept in the manifest: an index and its queries must be split alike.
WORDS_VERSION = 2

# Characters that are a syllable or more each: Han, Yi, Hangul.
_SYLLABIC = (
    "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua48c\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
# Letters of the other scripts that have no spaces between words.
_ALPHABETIC = (
    "\u3041-\u3096\u3099\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # kana
    "\u3105-\u312f\u31a0-\u31bf"  # Bopomofo
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e80-\u0ecf\u0edc-\u0edf"  # Thai, Lao
    "\u0f40-\u0f84\u0f86-\u0fbc\u1000-\u103f\u1050-\u108f\u109a-\u109d"  # Tibetan, Burmese
    "\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa76\uaa7a-\uaa7f"  # Burmese, extended
    "\u1780-\u17d3\u17d7\u17dc\u17dd"  # Khmer
    "\u1950-\u19c9\u1a20-\u1a7c\u1b00-\u1b4c\ua980-\ua9c0"  # Tai, Balinese, Javanese
)
_LETTER = f"[{_SYLLABIC}{_ALPHABETIC}]"
# Invisible characters that say where a line may break, or may not.
_JOINER = "[\u200b-\u200d\u2060]"
# Characters that have another form: of another width, or decomposed.
_VARIANTS = "[\u1100-\u11ff\u2e80-\u2fdf\u3040-\u30ff\uf900-\ufaff\uff00-\uffef]+"
# Blocks of characters with combining marks of the scripts above.
_MARK_BLOCKS = (
    range(0xE00, 0x1C00),
    range(0x3099, 0x309B),
    range(0xA980, 0xAB00),
)
_MARKS = "".join(chr(code) for block in _MARK_BLOCKS for code in block if category(chr(code)).startswith("M"))
# A run of letters of these scripts (group 1), or a run of other letters and digits.
_RUN = re.compile(rf"({_LETTER}(?:{_JOINER}*{_LETTER})*)|(?:(?!{_LETTER})\w)+")
# A character with the marks that belong to it, and what stands below it in Burmese and Khmer.
_UNIT = re.compile(f".(?:[{_MARKS}]|(?<=[\u1039\u17d2]).)*")


def tokenize(text: str) -> list[str]:
    """Split a text into words, without stemming and stop words.

    Args:
        text: Any text.

    Returns:
        The runs of letters and digits in lower case, in the order of the text. In scripts without spaces, and
        in Korean, a run gives its characters that are a syllable or more, then its pairs of neighbouring
        characters.
    """
    text = text.lower()
    if not text.isascii():
        text = re.sub(_VARIANTS, lambda match: normalize("NFKC", match[0]), text)
    if text.isascii() or not re.search(_LETTER, text):
        return re.findall(r"\w+", text)
    words = []
    for run in _RUN.finditer(text):
        if run[1]:
            words += _grams(run[1])
        else:
            words.append(run[0])
    return words


def _grams(run: str) -> list[str]:
    """Return the syllables of a run without spaces, then its pairs of neighbouring units."""
    units = _UNIT.findall(re.sub(_JOINER, "", run))
    grams = []
    for unit in units:
        is_syllable = len(unit) > 1 or re.match(f"[{_SYLLABIC}]", unit)
        if is_syllable or len(units) == 1:
            grams.append(unit)
    for first, second in pairwise(units):
        grams.append(first + second)
    return grams


def words_version(retriever_name: str) -> dict[str, int]:
    """Return the entry `words` of a manifest; no entry for an encoder that does not count words."""
    return {"words": WORDS_VERSION} if retriever_name in LEXICAL else {}
