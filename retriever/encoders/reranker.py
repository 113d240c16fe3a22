"""The reranker: a cross-encoder that orders the documents of a query again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from retriever.errors import RetrieverError, reason, require
from retriever.interfaces import CorpusRow, Hits

# Tokens of a pair of query and passage; what comes after them is cut off.
MAX_LENGTH = 512
# What to do without sentence-transformers.
INSTALL = "pip install 'calibadv-jax[dense]', or leave out --reranker_model"


class Reranker:
    """A cross-encoder, which reads query and passage together; in half precision on a GPU.

    Args:
        model: A folder or a hub name.
        batch_size: Pairs of query and passage that are scored at once.

    Attributes:
        model: The folder or hub name.
        batch_size: As above.

    Raises:
        RetrieverError: sentence-transformers is not installed, or the model cannot be loaded.
    """

    def __init__(self, model: str, batch_size: int = 32):
        library = require("sentence_transformers", INSTALL)
        import torch

        self.model = model
        self.batch_size = batch_size
        model_options = {"dtype": torch.float16} if torch.cuda.is_available() else {}
        try:
            self._encoder = library.CrossEncoder(
                model, max_length=MAX_LENGTH, trust_remote_code=False, model_kwargs=model_options
            )
        except (OSError, ValueError) as error:
            raise RetrieverError(f"--reranker_model {model}: cannot be loaded ({reason(error)})") from error
        self._lock = threading.Lock()

    def rerank(self, queries: Sequence[str], hits: Sequence[Hits], k: int) -> list[Hits]:
        """Return the best documents of each query.

        Args:
            queries: The texts.
            hits: Rows with scores for each query; their scores are not used.
            k: Largest number of documents to keep for each query.

        Returns:
            For each query at most k rows with the cross-encoder's scores, best first; equal scores keep the
            order of `hits`.
        """
        pairs = []
        for query, hits_of_query in zip(queries, hits, strict=True):
            for row, _ in hits_of_query:
                pairs.append((query, passage_text(row["contents"])))
        if not pairs:
            return [[] for _ in queries]
        with self._lock:  # tokenizers and the GPU are shared
            scores = self._encoder.predict(pairs, batch_size=self.batch_size).tolist()
        reranked = []
        start = 0
        for hits_of_query in hits:
            scores_of_query = scores[start : start + len(hits_of_query)]
            start += len(hits_of_query)
            scored: Hits = []
            for (row, _), score in zip(hits_of_query, scores_of_query, strict=True):
                scored.append((row, float(score)))
            scored.sort(key=_descending_score)
            reranked.append(scored[:k])
        return reranked


def _descending_score(hit: tuple[CorpusRow, float]) -> float:
    return -hit[1]


def passage_text(contents: str) -> str:
    """Return a passage as the authors' server passes it to the reranker: ``(Title: "T") text``."""
    title, _, text = contents.partition("\n")
    return f"(Title: {title}) {text}"
