"""Group statistics."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig


def raw(build, *scores, **settings):
    group = build.group(*((score, True, [build.turn("answer")]) for score in scores))
    return compute_advantages([group], AdvantageConfig(name="grpo", **settings)).credits[0].raw.tolist()


def test_two_scores(build):
    # mean 1/2, std with Bessel's correction sqrt(1/2)
    expected = 0.5 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(raw(build, 1.0, 0.0), [expected, -expected])


def test_centred_only(build):
    np.testing.assert_allclose(raw(build, 1.0, 0.0, 0.5, normalize_std=False), [0.5, -0.5, 0.0])


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("score", [0.1, 2 / 3, 6 / 7, 1.0, 0.0])
def test_ties_are_exactly_zero(build, size, score):
    assert raw(build, *[score] * size) == [0.0] * size


def test_group_of_one_keeps_its_score(build):
    assert raw(build, 0.6) == [0.6 / (1 + 1e-6)]
    assert raw(build) == []


def test_sampled_tokens_carry_the_trajectorys_advantage(build):
    group = build.group(
        (1.0, True, [build.turn(num_tokens=2, num_observed=3), build.turn("answer", num_tokens=1)]),
        (0.0, False, [build.turn("invalid", num_tokens=2, num_observed=1), build.turn("unfinished")]),
    )
    result = compute_advantages([group], AdvantageConfig(name="grpo"))
    high = np.float32(0.5 / (np.sqrt(0.5) + 1e-6))
    (first, second), trajectories = result.advantages[0], group.trajectories
    np.testing.assert_array_equal(first, [high, high, 0, 0, 0, high])
    np.testing.assert_array_equal(second, [-high, -high, 0, -high])
    for values, trajectory in zip((first, second), trajectories, strict=True):
        assert values.dtype == np.float32
        assert values.shape == trajectory.response_ids.shape
        assert not values[~trajectory.mask].any()


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_scores_must_be_finite(build, score):
    group = build.group((score, True, [build.turn("answer")]), (0.0, True, [build.turn("answer")]))
    with pytest.raises(ValueError, match="'q'.*not finite"):
        compute_advantages([group], AdvantageConfig(name="grpo"))
