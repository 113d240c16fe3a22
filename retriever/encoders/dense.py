"""Encoders with weights, through sentence-transformers."""

from __future__ import annotations

import copy
import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from retriever.encoders.probe import PROBE_FILE, probe
from retriever.errors import RetrieverError, reason, require
from retriever.interfaces import Encoder, Row

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

    def encode_passages(self, rows: Sequence[Row]) -> np.ndarray:
        texts = [row["contents"] for row in rows]
        return self._encode(texts, "encode_document", self._recipe.passage_prefix)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        return self._encode(list(queries), "encode_query", self._recipe.query_prefix)

    def save(self, folder: Path) -> None:
        np.save(folder / PROBE_FILE, probe(self))

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
        """A model that no other thread uses; copies share the weights."""
        try:
            return self._spare.pop()
        except IndexError:
            weights = itertools.chain(self._model.parameters(), self._model.buffers())
            return copy.deepcopy(self._model, {id(one): one for one in weights})

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
    """Within the block each device's own process encodes a part of the texts; without devices, this one.

    Raises:
        RetrieverError: the encoder has no network, there is no such device, or a process has ended.
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
        mask = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # inherited: Ctrl-C is this process's
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
    local = Path(model).is_dir() or not _is_hub_there(model)
    try:
        loaded = library.SentenceTransformer(model, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise RetrieverError(
            f"--retriever_model {model}: cannot be loaded as a sentence-transformers model ({reason(error)});"
            " name a folder that holds such a model, or a hub name if the hub can be reached"
        ) from error
    return loaded.half() if loaded.device.type == "cuda" else loaded


def _is_hub_there(model: str) -> bool:
    """Whether the hub answers; if it does not, what lies in its cache is taken.

    Raises:
        RetrieverError: it does not answer, and the model is not in the cache.
    """
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
            f"--retriever_model {model}: not in {constants.HF_HUB_CACHE}, and {why}; name a folder that holds"
            " the model, or fetch it on a machine that reaches the hub"
        )
    return False
