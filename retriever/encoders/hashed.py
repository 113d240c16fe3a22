"""The encoder without weights: BM25 in a dense space, and the words that BM25 counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import category, normalize
from zipfile import BadZipFile
from zlib import crc32

import numpy as np
from scipy.sparse import csr_matrix

from retriever.backends import LEXICAL
from retriever.corpus.passages import split_contents
from retriever.errors import RetrieverError, reason
from retriever.interfaces import CorpusRow

K1, B = 0.9, 0.4  # Pyserini's defaults for Wikipedia passages
WORDS = 2  # version of `words`: an index and its queries must be split alike

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
    """Return lower-case runs of letters and digits, without stemming and stop words.

    Scripts without spaces, and Korean, give pairs of neighbouring characters, and each character that is a
    syllable or more.
    """
    text = text.lower()
    if not text.isascii():
        text = re.sub(_VARIANTS, lambda match: normalize("NFKC", match[0]), text)
    if text.isascii() or not re.search(_LETTER, text):
        return re.findall(r"\w+", text)
    return [word for run in _RUN.finditer(text) for word in (_grams(run[1]) if run[1] else [run[0]])]


def words_version(retriever_name: str) -> dict[str, int]:
    """Return the entry of a manifest; empty for an encoder that does not count words."""
    return {"words": WORDS} if retriever_name in LEXICAL else {}


def _grams(run: str) -> list[str]:
    units = _UNIT.findall(re.sub(_JOINER, "", run))
    alone = [unit for unit in units if len(units) == 1 or len(unit) > 1 or re.match(f"[{_SYLLABIC}]", unit)]
    return alone + [first + second for first, second in pairwise(units)]


class HashedEncoder:
    """BM25 in a dense space, without weights and without a vocabulary.

    Words are hashed to features: a passage has their saturated frequency (Robertson & Zaragoza, "The
    Probabilistic Relevance Framework: BM25 and Beyond"), a query their presence, both times the square root
    of the inverse document frequency, so that the inner product is the BM25 score. A sparse signed random
    projection (Achlioptas, 2003) to `dimension` keeps inner products up to noise of 1 / sqrt(dimension).
    """

    name, model = "hashed", ""
    FEATURES = 2**20
    NONZEROS = 4  # per feature in the projection
    TITLE_WEIGHT = 2  # a word of the title counts this many times more

    def __init__(self, dimension: int, idf: np.ndarray, mean_length: float):
        self.dimension, self._idf, self._mean_length = dimension, idf, mean_length
        self._projection = self._project(dimension)

    @classmethod
    def fit(cls, corpus: Sequence[CorpusRow], dimension: int = 4096) -> HashedEncoder:
        """Count in how many passages each feature occurs."""
        frequency = np.zeros(cls.FEATURES, np.int64)
        total = 0
        for row in corpus:
            row_words = words(cls._text(row))
            total += len(row_words)
            frequency[list({cls._feature(word) for word in row_words})] += 1
        count = len(corpus)
        idf = np.log1p((count - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)
        return cls(dimension, idf, max(1.0, total / count))

    @classmethod
    def load(cls, folder: Path) -> HashedEncoder:
        with reading(folder / "encoder.npz") as path, np.load(path) as state:
            return cls(int(state["dimension"]), state["idf"], float(state["mean_length"]))

    def save(self, folder: Path) -> None:
        np.savez_compressed(
            folder / "encoder.npz", dimension=self.dimension, idf=self._idf, mean_length=self._mean_length
        )

    def encode_passages(self, rows: Sequence[CorpusRow]) -> np.ndarray:
        return self._dense([self._weights(words(self._text(row))) for row in rows])

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        rows = []
        for query in queries:
            features = {self._feature(word) for word in words(query)}
            rows.append({feature: float(np.sqrt(self._idf[feature])) for feature in features})
        return self._dense(rows)

    def _weights(self, row_words: list[str]) -> dict[int, float]:
        counts: dict[int, int] = {}
        for word in row_words:
            feature = self._feature(word)
            counts[feature] = counts.get(feature, 0) + 1
        norm = K1 * (1 - B + B * len(row_words) / self._mean_length)
        return {
            feature: float(np.sqrt(self._idf[feature]) * count * (K1 + 1) / (count + norm))
            for feature, count in counts.items()
        }

    def _dense(self, rows: list[dict[int, float]]) -> np.ndarray:
        lengths = [len(row) for row in rows]
        data = np.array([value for row in rows for value in row.values()], np.float32)
        indices = np.array([feature for row in rows for feature in row], np.int64)
        pointers = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        sparse = csr_matrix((data, indices, pointers), shape=(len(rows), self.FEATURES))
        return np.asarray((sparse @ self._projection).toarray(), np.float32)

    @classmethod
    def _project(cls, dimension: int) -> Any:
        rng = np.random.default_rng(0)  # a constant of the format: the same in every process
        columns = rng.integers(0, dimension, (cls.FEATURES, cls.NONZEROS), dtype=np.int32).ravel()
        signs = rng.integers(0, 2, columns.shape, dtype=np.int8).astype(np.float32) * 2 - 1
        pointers = np.arange(0, columns.size + 1, cls.NONZEROS)
        values = signs / np.float32(np.sqrt(cls.NONZEROS))
        return csr_matrix((values, columns, pointers), shape=(cls.FEATURES, dimension))

    @classmethod
    def _text(cls, row: CorpusRow) -> str:
        title, text = split_contents(row["contents"])
        return " ".join([title] * cls.TITLE_WEIGHT + [text])

    @classmethod
    def _feature(cls, word: str) -> int:
        return crc32(word.encode()) % cls.FEATURES


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Turn errors of reading an encoder's file into a RetrieverError that names it."""
    try:
        yield path
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise RetrieverError(f"{path}: cannot be read ({reason(error)}); build the index again") from error
