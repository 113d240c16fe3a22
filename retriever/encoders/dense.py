"""Encoders that are sentence-transformers models: E5, BGE, and any other."""

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

from retriever.errors import RetrieverError, reason, require
from retriever.interfaces import CorpusRow, Encoder

# The file with the vector of PROBE_TEXT, which identifies the model that built an index.
PROBE_FILE = "probe.npy"
PROBE_TEXT = "who wrote the book the origin of species"
# Texts that the model encodes at once.
BATCH = 64
# Texts that a process of `encode_on_devices` takes at once.
CHUNK = 1024
# Seconds for the hub to answer at all; its own client tries for a minute.
HUB_SECONDS = 5.0
# What to do without sentence-transformers.
INSTALL = "pip install 'calibadv-jax[dense]', or use --retriever_name hashed or bm25"


@dataclass(frozen=True)
class Recipe:
    """How a family of models expects its texts.

    Attributes:
        model: Hub name of the model that is used if none is named; empty if one must be named.
        query_prefix: Text before each query.
        passage_prefix: Text before each passage.
        pooling: How vectors of tokens become one vector, mean or cls. Empty: pooling and prefixes are those
            of the model's folder.
    """

    model: str
    query_prefix: str
    passage_prefix: str
    pooling: str


RECIPES = {
    # intfloat/e5-*: "Text Embeddings by Weakly-Supervised Contrastive Pre-training", section 4
    "e5": Recipe("intfloat/e5-base-v2", "query: ", "passage: ", "mean"),
    "bge": Recipe(
        "BAAI/bge-base-en-v1.5", "Represent this sentence for searching relevant passages: ", "", "cls"
    ),
    "dense": Recipe("", "", "", ""),
}


class DenseEncoder:
    """A sentence-transformers model; its vectors have length 1, so that the inner product is the cosine.

    Several threads may encode at the same time.

    Args:
        name: A key of RECIPES.
        model: Folder or hub name of the model; empty for the default of the name.

    Raises:
        RetrieverError: sentence-transformers is not installed, or the model cannot be loaded or pools
            otherwise than the recipe says.
    """

    def __init__(self, name: str, model: str = ""):
        self.name = name
        self._recipe = RECIPES[name]
        model = model or self._recipe.model
        is_folder = bool(model) and Path(model).is_dir()
        self.model = str(Path(model).resolve()) if is_folder else model
        self._model = _load(self.model, name)
        self._check_pooling()
        self.dimension = int(self._model.get_embedding_dimension())
        # The processes of `encode_on_devices`; None outside its block.
        self._pool: Any = None
        # Copies of the model that no thread uses: a tokenizer must not be used by two threads at once.
        self._idle_models = [self._model]

    def _check_pooling(self) -> None:
        from sentence_transformers.sentence_transformer.modules import Pooling

        pooling = self._recipe.pooling
        modes = [module.pooling_mode for module in self._model if isinstance(module, Pooling)]
        if pooling and modes != [pooling]:
            raise RetrieverError(
                f"--retriever_model {self.model}: pools by {modes}, and {self.name} needs {pooling}"
            )

    def encode_passages(self, rows: Sequence[CorpusRow]) -> np.ndarray:
        """Return the vectors of passages, float32 [len(rows), D]."""
        texts = [row["contents"] for row in rows]
        return self._encode(texts, "encode_document", self._recipe.passage_prefix)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries, float32 [len(queries), D]."""
        return self._encode(list(queries), "encode_query", self._recipe.query_prefix)

    def save(self, folder: Path) -> None:
        """Write the vector that identifies the model into a folder; raise OSError if it cannot be written."""
        np.save(folder / PROBE_FILE, self.encode_queries([PROBE_TEXT])[0])

    def _encode(self, texts: list[str], method: str, prefix: str) -> np.ndarray:
        """Return float32 [texts, D], by the named method of sentence-transformers."""
        options: dict[str, Any] = {
            "batch_size": BATCH,
            "normalize_embeddings": True,
            "show_progress_bar": False,
        }
        if self._recipe.pooling:
            # Without it, encode_query and encode_document take the prefix of the model's folder.
            options["prompt"] = prefix
        if self._pool is not None:
            options["pool"] = self._pool
            options["chunk_size"] = CHUNK
        model = self._take_model()
        try:
            vectors = getattr(model, method)(texts, **options)
        finally:
            self._idle_models.append(model)
        return np.asarray(vectors, np.float32).reshape(len(texts), self.dimension)

    def _take_model(self) -> Any:
        """Return a model that no other thread uses."""
        try:
            return self._idle_models.pop()
        except IndexError:
            # All are in use: make a copy, which shares the weights.
            weights = itertools.chain(self._model.parameters(), self._model.buffers())
            shared = {id(array): array for array in weights}
            return copy.deepcopy(self._model, shared)


@contextmanager
def encode_on_devices(encoder: Encoder, devices: Sequence[str]) -> Iterator[None]:
    """Let a process on each device encode, within the block.

    Args:
        encoder: A DenseEncoder; any encoder if there are no devices.
        devices: Names of torch's devices, such as cuda:0; empty: this process encodes.

    Raises:
        RetrieverError: There is no such device, or one of the processes has ended.
    """
    if not devices:
        yield
        return
    assert isinstance(encoder, DenseEncoder)  # `BuildOptions.check` refuses devices for other encoders
    import torch

    try:
        for device in devices:
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        raise RetrieverError(f"--devices {','.join(devices)}: {reason(error)}") from error
    pool = None
    try:
        # The processes inherit the mask: only this process handles Ctrl-C.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pool = encoder._model.start_multi_process_pool(list(devices))
            encoder._pool = pool
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    except RuntimeError as error:  # one of the processes has ended
        raise RetrieverError(f"--devices {','.join(devices)}: {reason(error)}") from error
    finally:
        encoder._pool = None
        if pool is not None:
            encoder._model.stop_multi_process_pool(pool)


def _load(model: str, name: str) -> Any:
    """Return a sentence-transformers model, in half precision on a GPU."""
    if not model:
        raise RetrieverError(f"--retriever_name {name}: set --retriever_model to a folder or hub name")
    library = require("sentence_transformers", INSTALL)
    is_local = Path(model).is_dir() or not _hub_answers(model)
    try:
        loaded = library.SentenceTransformer(model, local_files_only=is_local, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise RetrieverError(
            f"--retriever_model {model}: cannot be loaded as a sentence-transformers model ({reason(error)})"
        ) from error
    if loaded.device.type == "cuda":
        return loaded.half()
    return loaded


def is_here(model: str) -> bool:
    """Return whether a model can be used without choosing a new one to download.

    Args:
        model: Folder or hub name of a model.

    Returns:
        True for a folder, a model in the hub's cache, and the usual model of an encoder.
    """
    usual_models = [recipe.model for recipe in RECIPES.values()]
    if Path(model).is_dir() or model in usual_models:
        return True
    hub = require("huggingface_hub", INSTALL)
    try:
        return isinstance(hub.try_to_load_from_cache(model, "config.json"), str)
    except ValueError:  # no name of a repository
        return False


def _hub_answers(model: str) -> bool:
    """Return whether the hub answers; if not, raise RetrieverError unless the model is in its cache."""
    hub = require("huggingface_hub", INSTALL)
    constants = require("huggingface_hub.constants", INSTALL)
    if constants.HF_HUB_OFFLINE:
        cause = "HF_HUB_OFFLINE is set"
    else:
        try:
            httpx.head(constants.ENDPOINT, timeout=HUB_SECONDS)
            return True
        except (httpx.HTTPError, ImportError) as error:  # ImportError: httpx lacks a package for a proxy
            cause = f"{constants.ENDPOINT} does not answer: {reason(error)}"
    if not isinstance(hub.try_to_load_from_cache(model, "config.json"), str):
        raise RetrieverError(
            f"--retriever_model {model}: not in {constants.HF_HUB_CACHE}, and {cause}; name a folder"
        )
    return False
