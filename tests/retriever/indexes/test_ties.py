"""Ties for the last place against all documents sorted, for one query and for many at once."""

import numpy as np
import pytest

from retriever.indexes.faiss import MORE, MOST, search_in_corpus_order


def engine(scores, asked):
    """Gives the best `count` of each row, of those that tie the last ones first, as engines may."""

    def search(count):
        asked.append(count)
        order = np.lexsort((-np.arange(scores.shape[1])[None].repeat(len(scores), 0), -scores), axis=1)
        order = order[:, :count]
        return np.take_along_axis(scores, order, 1), order

    return search


@pytest.mark.parametrize("k", [1, 3, 20])
@pytest.mark.parametrize("documents", [1, 5, MORE + 4, 300])
@pytest.mark.parametrize("levels", [1, 3, 1000], ids="{} scores".format)
def test_a_query_finds_the_same_alone_and_among_others(k, documents, levels):
    """Rows of few and of many ties stand in one batch."""
    rng = np.random.default_rng(k * documents)
    scores = rng.integers(0, levels, (6, documents)).astype(np.float32)
    scores[1] = np.arange(documents)  # none tie
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    together, ids = search_in_corpus_order(engine(scores, []), k, documents)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(together, np.take_along_axis(scores, expected, 1))
    for number, row in enumerate(scores):
        _, alone = search_in_corpus_order(engine(row[None], []), k, documents)
        np.testing.assert_array_equal(alone[0], expected[number])


def test_no_more_is_fetched_than_the_ties_need():
    asked = []
    search_in_corpus_order(engine(np.arange(5000, dtype=np.float32)[None], asked), 3, 5000)
    assert asked == [3 + MORE]
    asked.clear()
    search_in_corpus_order(engine(np.zeros((1, 5000), np.float32), asked), 3, 5000)
    assert asked[-1] == MOST and asked == sorted(set(asked))


def test_places_without_a_document_come_last():
    """-1 is what an engine gives where it found fewer."""
    found = np.array([[0.5, 0.5, 0.0]], np.float32), np.array([[4, 2, -1]])
    scores, ids = search_in_corpus_order(lambda count: found, 3, 9)
    assert ids.tolist() == [[2, 4, -1]] and scores[0, 2] == -np.inf
