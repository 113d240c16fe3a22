"""Encoders: texts to vectors, hashed (BM25 in a dense space) or by a model; rerankers."""

from __future__ import annotations

import copy
import itertools
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import category, normalize
from zipfile import BadZipFile
from zlib import crc32

import httpx
import numpy as np
from scipy.sparse import csr_matrix

from retriever.backends import LEXICAL
from retriever.corpus.passages import split_contents
from retriever.errors import RetrieverError, reason, require
from retriever.interfaces import CorpusRow, Encoder, Hits

K1, B = 0.9, 0.4  # Pyserini's defaults for Wikipedia passages
WORDS = 2  # version of `tokenize`: an index and its queries must be split alike

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


def tokenize(text: str) -> list[str]:
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
            row_words = tokenize(cls._text(row))
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
        path = folder / "encoder.npz"
        np.savez_compressed(path, dimension=self.dimension, idf=self._idf, mean_length=self._mean_length)

    def encode_passages(self, rows: Sequence[CorpusRow]) -> np.ndarray:
        return self._dense([self._weights(tokenize(self._text(row))) for row in rows])

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        rows = [{self._feature(word) for word in tokenize(query)} for query in queries]
        return self._dense([{feature: float(np.sqrt(self._idf[feature])) for feature in row} for row in rows])

    def _weights(self, row_words: list[str]) -> dict[int, float]:
        counts = Counter(map(self._feature, row_words))
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


PROBE_FILE = "probe.npy"  # the vector of PROBE_TEXT: identifies the model that built an index
PROBE_TEXT = "who wrote the book the origin of species"
PROBE_COSINE = 0.98  # fp16 and another machine's kernels stay above 0.999
PASSAGE_COSINE = 0.5  # of a passage's vector: built in fp16, or with passages cut elsewhere, it is less
BATCH = 64
CHUNK = 1024  # texts that a process of `spread` takes at once
HUB_SECONDS = 5.0  # for the hub to answer at all; its own client tries for a minute
INSTALL = "pip install 'calibadv-jax[dense]', or use --retriever_name hashed or bm25"


@dataclass(frozen=True)
class Recipe:
    """How a family of models expects its texts."""

    model: str  # used if none is named
    query_prefix: str
    passage_prefix: str
    pooling: str  # empty: as the model's folder says


RECIPES = {
    # intfloat/e5-*: "Text Embeddings by Weakly-Supervised Contrastive Pre-training", section 4
    "e5": Recipe("intfloat/e5-base-v2", "query: ", "passage: ", "mean"),
    "bge": Recipe(
        "BAAI/bge-base-en-v1.5", "Represent this sentence for searching relevant passages: ", "", "cls"
    ),
    "dense": Recipe("", "", "", ""),
}


class DenseEncoder:
    """A sentence-transformers model; its vectors have length 1, so that inner product is cosine."""

    def __init__(self, name: str, model: str = ""):
        self.name, self._recipe = name, RECIPES[name]
        model = model or self._recipe.model
        self.model = str(Path(model).resolve()) if model and Path(model).is_dir() else model
        self._model = _load(self.model, name)
        from sentence_transformers.sentence_transformer.modules import Pooling

        pooling = self._recipe.pooling
        modes = [part.pooling_mode for part in self._model if isinstance(part, Pooling)]
        if pooling and modes != [pooling]:
            problem = f"pools by {modes}, and {name} needs {pooling}"
            raise RetrieverError(f"--retriever_model {self.model}: {problem}")
        self.dimension = int(self._model.get_embedding_dimension())
        self._pool: Any = None  # of `spread`
        self._spare = [self._model]  # a tokenizer must not be used by two threads at once

    def encode_passages(self, rows: Sequence[CorpusRow]) -> np.ndarray:
        texts = [row["contents"] for row in rows]
        return self._encode(texts, "encode_document", self._recipe.passage_prefix)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        return self._encode(list(queries), "encode_query", self._recipe.query_prefix)

    def save(self, folder: Path) -> None:
        np.save(folder / PROBE_FILE, self.encode_queries([PROBE_TEXT])[0])

    def _encode(self, texts: list[str], encode: str, prefix: str) -> np.ndarray:
        # Without a prefix of ours, encode_query and encode_document take the one in the model's folder.
        options: dict[str, Any] = {"prompt": prefix} if self._recipe.pooling else {}
        if self._pool is not None:
            options |= {"pool": self._pool, "chunk_size": CHUNK}
        try:
            model = self._spare.pop()
        except IndexError:  # all are in use: a copy shares the weights
            weights = itertools.chain(self._model.parameters(), self._model.buffers())
            model = copy.deepcopy(self._model, {id(array): array for array in weights})
        options |= {"batch_size": BATCH, "normalize_embeddings": True, "show_progress_bar": False}
        try:
            vectors = getattr(model, encode)(texts, **options)
        finally:
            self._spare.append(model)
        return np.asarray(vectors, np.float32).reshape(len(texts), self.dimension)


@contextmanager
def spread(encoder: Encoder, devices: Sequence[str]) -> Iterator[None]:
    """Encode within the block by a process on each device; without devices, by this process.

    Raises RetrieverError: there is no such device, or a process has ended.
    """
    if not devices:
        yield
        return
    assert isinstance(encoder, DenseEncoder)  # as `BuildOptions.check` says
    import torch

    pool = None
    try:
        for device in devices:
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # of a torch without CUDA
        raise RetrieverError(f"--devices {','.join(devices)}: {reason(error)}") from error
    try:
        # Inherited: only this process handles Ctrl-C.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pool = encoder._pool = encoder._model.start_multi_process_pool(list(devices))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    except RuntimeError as error:  # a process has ended
        raise RetrieverError(f"--devices {','.join(devices)}: {reason(error)}") from error
    finally:
        encoder._pool = None
        if pool is not None:
            encoder._model.stop_multi_process_pool(pool)


def _load(model: str, name: str) -> Any:
    if not model:
        raise RetrieverError(f"--retriever_name {name}: set --retriever_model to a folder or hub name")
    library = require("sentence_transformers", INSTALL)
    local = Path(model).is_dir() or not _hub_answers(model)
    try:
        loaded = library.SentenceTransformer(model, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        problem = f"cannot be loaded as a sentence-transformers model ({reason(error)})"
        raise RetrieverError(f"--retriever_model {model}: {problem}") from error
    return loaded.half() if loaded.device.type == "cuda" else loaded


def _hub_answers(model: str) -> bool:
    """Whether the hub answers; if not, the model must be in its cache, else RetrieverError."""
    hub = require("huggingface_hub", INSTALL)
    constants = require("huggingface_hub.constants", INSTALL)
    try:
        if not constants.HF_HUB_OFFLINE:
            httpx.head(constants.ENDPOINT, timeout=HUB_SECONDS)
            return True
        cause = "HF_HUB_OFFLINE is set"
    except (httpx.HTTPError, ImportError) as error:  # also a proxy for which httpx lacks a package
        cause = f"{constants.ENDPOINT} does not answer: {reason(error)}"
    if not isinstance(hub.try_to_load_from_cache(model, "config.json"), str):
        problem = f"not in {constants.HF_HUB_CACHE}, and {cause}"
        raise RetrieverError(f"--retriever_model {model}: {problem}; name a folder")
    return False


def check_dimension(where: object, dimension: int, encoder: Encoder) -> None:
    """Raise RetrieverError if an index has vectors of another dimension than the encoder's."""
    if dimension != encoder.dimension:
        problem = f"{where}: holds vectors of dimension {dimension}"
        other = f"{encoder.model or encoder.name} makes {encoder.dimension}"
        raise RetrieverError(f"{problem}, and {other}; set --retriever_model to the model that built it")


def check_vector(where: str, vector: np.ndarray, row: CorpusRow, encoder: Encoder) -> None:
    """Raise RetrieverError if the vector of a passage is not what the encoder makes of it."""
    likeness = cosine(vector, encoder.encode_passages([row])[0])
    if likeness < PASSAGE_COSINE:
        problem = f"{where}: its vector is not what {encoder.model} makes of its text (cosine {likeness:.2f})"
        advice = "set --retriever_name and --retriever_model to the encoder that built it"
        raise RetrieverError(f"{problem}; {advice}")


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / max(1e-12, float(np.linalg.norm(a) * np.linalg.norm(b))))


def make_encoder(name: str, model: str, corpus: Sequence[CorpusRow]) -> Encoder:
    """Return an encoder for a new index; raises RetrieverError for an unknown name or model.

    `model` is a folder or hub name of a sentence-transformers model; empty: the default of the name.
    """
    if name == HashedEncoder.name:
        if model:
            raise RetrieverError(f"--retriever_model {model}: hashed has no model; leave it out")
        return HashedEncoder.fit(corpus)
    if name not in RECIPES:
        raise RetrieverError(f"encoder {name!r} is unknown; available are hashed, {', '.join(RECIPES)}, bm25")
    return DenseEncoder(name, model)


def load_encoder(folder: Path, name: str, model: str) -> Encoder:
    """Return the encoder that `save` wrote; raises RetrieverError if the model is not the index's."""
    if name == HashedEncoder.name and not model:
        return HashedEncoder.load(folder)
    encoder = make_encoder(name, model, ())
    with reading(folder / PROBE_FILE) as path:
        built = np.load(path)  # float32 [dimension]
    check_dimension(folder, built.size, encoder)
    likeness = cosine(built, encoder.encode_queries([PROBE_TEXT])[0])
    if likeness < PROBE_COSINE:
        problem = f"{folder}: built with another model than {encoder.model} ({likeness:.2f})"
        raise RetrieverError(f"{problem}; set --retriever_model")
    return encoder


class Reranker:
    """A cross-encoder, which reads query and passage together; in half precision on a GPU.

    Raises RetrieverError: sentence-transformers is not installed, or the model cannot be loaded.
    """

    def __init__(self, model: str, batch_size: int = 32):
        advice = "pip install 'calibadv-jax[dense]', or leave out --reranker_model"
        library = require("sentence_transformers", advice)
        import torch

        self.model, self.batch_size = model, batch_size
        model_options = {"dtype": torch.float16} if torch.cuda.is_available() else {}
        try:
            self._encoder = library.CrossEncoder(
                model, max_length=512, trust_remote_code=False, model_kwargs=model_options
            )
        except (OSError, ValueError) as error:
            raise RetrieverError(f"--reranker_model {model}: cannot be loaded ({reason(error)})") from error
        self._lock = threading.Lock()

    def rerank(self, queries: Sequence[str], hits: Sequence[Hits], k: int) -> list[Hits]:
        """Return the k best documents of each query with the cross-encoder's scores, best first."""
        pairs = [
            (query, passage_text(row["contents"]))
            for query, hits_of_query in zip(queries, hits, strict=True)
            for row, _ in hits_of_query
        ]
        if not pairs:
            return [[] for _ in queries]
        with self._lock:  # tokenizers and the GPU are shared
            scores = iter(self._encoder.predict(pairs, batch_size=self.batch_size).tolist())
        scored = [[(row, float(next(scores))) for row, _ in hits_of_query] for hits_of_query in hits]
        return [sorted(hits_of_query, key=lambda hit: -hit[1])[:k] for hits_of_query in scored]


def passage_text(contents: str) -> str:
    """Return a passage as in the authors' server: ``(Title: "T") text``."""
    title, _, text = contents.partition("\n")
    return f"(Title: {title}) {text}"
