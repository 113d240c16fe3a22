"""From row numbers to rows: what an approximate index did not find is not there."""

import numpy as np

from retriever.indexes.index import Index

ROWS = [{"id": str(number)} for number in range(4)]


class Sparse:
    """Finds row 2 for every query, and fewer than it is asked for."""

    documents = len(ROWS)

    def rank(self, queries, k):
        self.asked = k
        scores = np.full((len(queries), k), -np.inf, np.float32)
        found = np.full((len(queries), k), -1, np.int64)
        scores[:, 0], found[:, 0] = 0.5, 2
        return scores, found


def test_what_was_not_found_is_left_out():
    ranker = Sparse()
    index = Index(ROWS, ranker, {})
    assert index.search(["a", "b"], 3) == [[(ROWS[2], 0.5)]] * 2
    assert index.search(["a"], 9) == [[(ROWS[2], 0.5)]]
    assert ranker.asked == 4  # there are no more
    assert index.search([], 3) == []
