"""Encoders with weights, through sentence-transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retriever.encoders.probe import PROBE_FILE, probe
from retriever.errors import RetrieverError, reason, require
from retriever.protocol import Row

BATCH = 64
INSTALL = "pip install 'calibadv-jax[dense]', or use --retriever_name hashed or bm25"


@dataclass(frozen=True)
class Recipe:
    """How a family of models expects its texts."""

    model: str  # used where none is named
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
        self._lock = threading.Lock()  # the tokenizer must not be used by two threads at once

    def encode_passages(self, rows: Sequence[Row]) -> np.ndarray:
        texts = [row["contents"] for row in rows]
        return self._encode(texts, self._model.encode_document, self._recipe.passage_prefix)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        return self._encode(list(queries), self._model.encode_query, self._recipe.query_prefix)

    def save(self, folder: Path) -> None:
        np.save(folder / PROBE_FILE, probe(self))

    def _encode(self, texts: list[str], encode: Any, prefix: str) -> np.ndarray:
        # Without a prefix of ours, encode_query and encode_document take the one in the model's folder.
        options = {"prompt": prefix} if self._recipe.pooling else {}
        with self._lock:
            vectors = encode(
                texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False, **options
            )
        return np.asarray(vectors, np.float32).reshape(len(texts), self.dimension)

    def _check_pooling(self) -> None:
        from sentence_transformers.sentence_transformer.modules import Pooling

        modes = [module.pooling_mode for module in self._model if isinstance(module, Pooling)]
        if self._recipe.pooling and modes != [self._recipe.pooling]:
            raise RetrieverError(
                f"--retriever_model {self.model}: pools by {modes}, and {self.name} needs"
                f" {self._recipe.pooling}; name a model of that family, with its modules.json, or use"
                " --retriever_name dense"
            )


def _load(model: str, name: str) -> Any:
    if not model:
        raise RetrieverError(f"--retriever_name {name}: set --retriever_model to a folder or hub name")
    library = require("sentence_transformers", INSTALL)
    local = Path(model).is_dir()
    try:
        loaded = library.SentenceTransformer(model, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise RetrieverError(
            f"--retriever_model {model}: cannot be loaded as a sentence-transformers model ({reason(error)});"
            " name a folder that holds one, or a hub name where the hub can be reached"
        ) from error
    return loaded.half() if loaded.device.type == "cuda" else loaded
