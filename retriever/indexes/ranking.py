"""Ranking with ties in corpus order, so that results depend neither on the engine nor on the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Rows fetched beyond k at first, to see where the tie for the k-th place ends.
EXTRA_ROWS = 16
# Most rows that are fetched. If more tie, as for an empty query, the first of those fetched are taken.
MAX_ROWS = 1024


def search_in_corpus_order(
    search: Callable[[int], tuple[np.ndarray, np.ndarray]], k: int, documents: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best rows of each query, ties in corpus order.

    More rows are fetched until the tie for the k-th place has ended, or MAX_ROWS are fetched.

    Args:
        search: Returns, for a count, scores float32 [Q, count] and row numbers int64 [Q, count], best first,
            ties in any order; row number -1 where fewer rows are found.
        k: Number of rows for each query.
        documents: Number of rows of the index.

    Returns:
        Scores float32 [Q, k] and row numbers int64 [Q, k], best first, ties in corpus order; fewer columns
        if the index has fewer than k rows. Places with row number -1 come last and have the score -inf.
    """
    k = min(k, documents)
    fetched = min(k + EXTRA_ROWS, documents)
    most = min(MAX_ROWS, documents)
    while True:
        scores, ids = search(fetched)
        scores = np.where(ids < 0, -np.inf, scores)
        # Queries whose last row fetched still ties with the k-th, so that more rows may tie.
        is_cut = (scores[:, -1] == scores[:, k - 1]) & (ids[:, -1] >= 0)
        if fetched >= most or not is_cut.any():
            break
        fetched = min(4 * fetched, most)
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


def top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the best scores of one query, ties in corpus order.

    Args:
        scores: [documents], a score for each row.
        k: Number of rows, at least 1.

    Returns:
        Scores [min(k, documents)], best first, and row numbers int64 of the same shape.
    """
    if k < len(scores):
        k_th = len(scores) - k
        threshold = np.partition(scores, k_th)[k_th]
        better = np.flatnonzero(scores > threshold)
        equal = np.flatnonzero(scores == threshold)[: k - len(better)]
        ids = np.concatenate([better, equal])
    else:
        ids = np.arange(len(scores))
    order = np.lexsort((ids, -scores[ids]))
    ids = ids[order]
    return scores[ids], ids
