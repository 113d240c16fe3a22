"""The answer turn is the last one with a sampled token: an empty turn after it changes nothing."""

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig


def winner(build):
    return (1.0, True, [build.turn(documents=["a"], num_observed=1), build.turn("answer", num_tokens=2)])


@pytest.mark.parametrize("num_empty", [0, 1, 2])
@pytest.mark.parametrize("rebalance", [False, True])
def test_search_before_empty_turns_is_not_softened(build, num_empty, rebalance):
    empty = [build.turn("unfinished", num_tokens=0)] * num_empty
    lost = [build.turn(documents=["a"], num_tokens=4), *empty]
    group = build.group(winner(build), (0.0, True, lost))
    config = AdvantageConfig(rebalance=rebalance)
    result = compute_advantages([group], config)
    assert result.credits[0].correctness[1][0] == 1.0  # it found the silver document
    right, wrong = result.advantages[0]
    assert (wrong < 0).all()  # all of the blame stays
    assert wrong[0] == pytest.approx(-np.sqrt(0.5), abs=1e-5)
    assert right[-1] == pytest.approx(np.sqrt(0.5) * (2 if rebalance else 1), abs=1e-5)


@pytest.mark.parametrize("num_empty", [0, 1])
def test_search_before_last_sampled_turn_is_softened(build, num_empty):
    empty = [build.turn("unfinished", num_tokens=0)] * num_empty
    lost = [build.turn(documents=["a"], num_tokens=4), build.turn("answer", num_tokens=2), *empty]
    group = build.group(winner(build), (0.0, True, lost))
    wrong = compute_advantages([group], AdvantageConfig(rebalance=False)).advantages[0][1]
    np.testing.assert_allclose(wrong[:4], 0.0, atol=1e-12)
    assert (wrong[4:] < 0).all()
