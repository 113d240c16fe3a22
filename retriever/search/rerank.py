"""Cross-encoder: reads query and passage together and scores the pair."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from retriever.errors import RetrieverError, reason, require
from retriever.interfaces import Found


class Reranker:
    """A sentence-transformers CrossEncoder, in half precision on a GPU.

    Args:
        model: folder or hub name.

    Raises:
        RetrieverError: sentence-transformers is not installed, or the model cannot be loaded.
    """

    def __init__(self, model: str, batch_size: int = 32):
        library = require(
            "sentence_transformers", "pip install 'calibadv-jax[dense]', or leave out --reranker_model"
        )
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

    def rerank(self, queries: Sequence[str], found: Sequence[Found], k: int) -> list[Found]:
        """The k best documents of each query with the cross-encoder's scores, best first."""
        pairs = [
            (query, passage_text(row["contents"]))
            for query, one in zip(queries, found, strict=True)
            for row, _ in one
        ]
        if not pairs:
            return [[] for _ in queries]
        with self._lock:  # tokenizers and the GPU are shared
            scores = iter(self._encoder.predict(pairs, batch_size=self.batch_size).tolist())
        scored = [[(row, float(next(scores))) for row, _ in one] for one in found]
        return [sorted(one, key=lambda item: -item[1])[:k] for one in scored]


def passage_text(contents: str) -> str:
    """What the cross-encoder reads of a passage, as in the authors' server: ``(Title: "T") text``."""
    title, _, text = contents.partition("\n")
    return f"(Title: {title}) {text}"
