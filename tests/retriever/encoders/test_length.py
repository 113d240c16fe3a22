"""The encoder without weights: a word counts less in a long passage than in a short one."""

import pytest

pytest.importorskip("faiss")

from retriever.encoders import HashedEncoder


def test_a_long_passage_is_discounted_as_bm25_discounts_it():
    """One `port` among 2 and among 61 words; twenty others without it make it rare."""
    rows = [{"contents": '""\nport short'}, {"contents": '""\nport ' + " ".join(f"w{n}" for n in range(60))}]
    rows += [{"contents": f'""\nother{n} thing{n}'} for n in range(20)]
    encoder = HashedEncoder.fit(
        rows, dimension=2**15
    )  # wide, so that the projection adds no noise to speak of
    mean = (2 + 61 + 20 * 2) / len(rows)
    short, long = (encoder.encode_passages(rows[:2]) @ encoder.encode_queries(["port"]).T).ravel().tolist()
    expected = [1.9 / (1 + 0.9 * (0.6 + 0.4 * words / mean)) for words in (2, 61)]
    assert long / short == pytest.approx(expected[1] / expected[0], rel=0.1)
    assert expected[1] / expected[0] < 0.5
