"""Models with weights, through sentence-transformers: encoders and rerankers; encoders by name."""

from __future__ import annotations

import copy
import itertools
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from retriever.encoders.hashed import HashedEncoder, reading
from retriever.errors import RetrieverError, reason, require
from retriever.interfaces import CorpusRow, Encoder, Hits

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
        self._check_pooling()
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
        model = self._take()
        try:
            vectors = getattr(model, encode)(
                texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False, **options
            )
        finally:
            self._spare.append(model)
        return np.asarray(vectors, np.float32).reshape(len(texts), self.dimension)

    def _take(self) -> Any:
        """Return a model that no other thread uses; copies share the weights."""
        try:
            return self._spare.pop()
        except IndexError:
            weights = itertools.chain(self._model.parameters(), self._model.buffers())
            return copy.deepcopy(self._model, {id(array): array for array in weights})

    def _check_pooling(self) -> None:
        from sentence_transformers.sentence_transformer.modules import Pooling

        modes = [module.pooling_mode for module in self._model if isinstance(module, Pooling)]
        if self._recipe.pooling and modes != [self._recipe.pooling]:
            raise RetrieverError(
                f"--retriever_model {self.model}: pools by {modes}, and {self.name} needs"
                f" {self._recipe.pooling}; name a model of that family, with its modules.json, or use"
                " --retriever_name dense"
            )


@contextmanager
def spread(encoder: Encoder, devices: Sequence[str]) -> Iterator[None]:
    """Encode within the block by a process on each device; without devices, by this process.

    Raises RetrieverError: the encoder has no network, there is no such device, or a process has ended.
    """
    if not devices:
        yield
        return
    if not isinstance(encoder, DenseEncoder):
        raise RetrieverError(f"--devices {','.join(devices)}: {encoder.name} has no network; leave it out")
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
        raise RetrieverError(
            f"--retriever_model {model}: cannot be loaded as a sentence-transformers model ({reason(error)});"
            " name a folder that holds such a model, or a hub name if the hub can be reached"
        ) from error
    return loaded.half() if loaded.device.type == "cuda" else loaded


def _hub_answers(model: str) -> bool:
    """Whether the hub answers; if not, the model must be in its cache, else RetrieverError."""
    hub = require("huggingface_hub", INSTALL)
    constants = require("huggingface_hub.constants", INSTALL)
    try:
        if not constants.HF_HUB_OFFLINE:
            httpx.head(constants.ENDPOINT, timeout=HUB_SECONDS)
            return True
        why = "HF_HUB_OFFLINE is set"
    except httpx.HTTPError as error:
        why = f"{constants.ENDPOINT} does not answer: {reason(error)}"
    if not isinstance(hub.try_to_load_from_cache(model, "config.json"), str):
        raise RetrieverError(
            f"--retriever_model {model}: not in {constants.HF_HUB_CACHE}, and {why}; name a folder"
        )
    return False


def check_dimension(where: object, dimension: int, encoder: Encoder) -> None:
    """Raise RetrieverError if an index has vectors of another dimension than the encoder's."""
    if dimension != encoder.dimension:
        raise RetrieverError(
            f"{where}: holds vectors of dimension {dimension}, and {encoder.model or encoder.name} makes"
            f" {encoder.dimension}; set --retriever_model to the model that built it"
        )


def check_vector(where: str, vector: np.ndarray, row: CorpusRow, encoder: Encoder) -> None:
    """Raise RetrieverError if the vector of a passage is not what the encoder makes of it."""
    likeness = cosine(vector, encoder.encode_passages([row])[0])
    if likeness < PASSAGE_COSINE:
        raise RetrieverError(
            f"{where}: its vector is not what {encoder.model} makes of its text (cosine {likeness:.2f}); set"
            " --retriever_name and --retriever_model to the encoder that built it"
        )


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
        raise RetrieverError(
            f"{folder}: built with another model than {encoder.model} ({likeness:.2f}); set --retriever_model"
        )
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
        kwargs: dict[str, Any] = {"dtype": torch.float16} if torch.cuda.is_available() else {}
        try:
            self._encoder = library.CrossEncoder(
                model, max_length=512, trust_remote_code=False, model_kwargs=kwargs
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
