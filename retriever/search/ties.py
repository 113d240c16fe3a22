"""Search engines keep any passages that tie for the last place; here the first in corpus order are kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MORE = 16  # fetched beyond k at first
MOST = 1024  # if more than this tie (an empty query), the first of those fetched are taken

Search = Callable[[int], tuple[np.ndarray, np.ndarray]]


def search_in_corpus_order(search: Search, k: int, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Fetches until the tie for the k-th place has ended.

    Args:
        search: gives for a count the scores float32 [Q, count] and row numbers int64 [Q, count], or -1.

    Returns:
        Scores [Q, k] and row numbers [Q, k], best first, ties in corpus order; -1 comes last.
    """
    k, fetch = min(k, documents), min(k + MORE, documents)
    while True:
        scores, ids = search(fetch)
        scores = np.where(ids < 0, -np.inf, scores)
        is_cut = (scores[:, -1] == scores[:, k - 1]) & (ids[:, -1] >= 0)
        if fetch >= min(MOST, documents) or not is_cut.any():
            break
        fetch = min(4 * fetch, MOST, documents)
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
