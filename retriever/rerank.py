"""Cross-encoder: reads query and passage together and scores the pair."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from retriever.errors import RetrieverError, require
from retriever.protocol import Found


class Reranker:
    """A sentence-transformers CrossEncoder, in half precision on a GPU.

    Args:
        model: folder or hub name.

    Raises:
        RetrieverError: sentence-transformers is not installed, or the model can not be loaded.
    """

    def __init__(self, model: str, batch_size: int = 32, max_length: int = 512):
        library = require(
            "sentence_transformers", "pip install 'calibadv-jax[dense]', or leave out --reranker_model"
        )
        import torch

        self.model, self.batch_size = model, batch_size
        kwargs: dict[str, Any] = {"dtype": torch.float16} if torch.cuda.is_available() else {}
        try:
            self._encoder = library.CrossEncoder(
                model, max_length=max_length, trust_remote_code=False, model_kwargs=kwargs
            )
        except (OSError, ValueError) as error:
            raise RetrieverError(
                f"--reranker_model {model}: can not be loaded ({' '.join(str(error).split())[:200]})"
            ) from error
        self._lock = threading.Lock()

    def rerank(self, queries: Sequence[str], found: Sequence[Found], k: int, not_sort: bool) -> list[Found]:
        """The k best documents of each query with the cross-encoder's scores.

        Args:
            not_sort: keep them in the order in which they were retrieved.
        """
        pairs = [
            (query, row["contents"]) for query, one in zip(queries, found, strict=True) for row, _ in one
        ]
        if not pairs:
            return [[] for _ in queries]
        with self._lock:  # tokenizers and the GPU are shared
            scores = iter(self._encoder.predict(pairs, batch_size=self.batch_size).tolist())
        result = []
        for one in found:
            scored = [(row, float(next(scores))) for row, _ in one]
            best = sorted(range(len(scored)), key=lambda index: -scored[index][1])[:k]
            result.append([scored[index] for index in (sorted(best) if not_sort else best)])
        return result
