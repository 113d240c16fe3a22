"""Trajectories that could not be finished: their group is as if it did not have them."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Group

CONFIGS = [
    AdvantageConfig(name="grpo"),
    AdvantageConfig(),
    AdvantageConfig(adjust="negative", target_ratio=2),
]


def fail(group, *indices):
    for index in indices:
        group.trajectories[index].error = "retriever: gone"
    return Group.of(group.question, group.trajectories)


def members(build):
    """Scores 1, 0.5 and 0, searches among silver and other documents, answers of different lengths."""
    rows = [(1.0, ["a", "b"], 2), (0.5, ["c", "x"], 3), (0.0, ["a", "x"], 4)]
    return [
        (score, True, [build.turn(documents=docs, num_observed=2), build.turn("answer", num_tokens=length)])
        for score, docs, length in rows
    ]


def broken_off(build):
    """It had a good score and the silver documents' best, but does not count."""
    return (1.0, True, [build.turn(documents=["x", "y"], num_tokens=3)])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("place", [0, 2, 3])
def test_failed_trajectory_changes_no_other(build, config, place):
    whole = build.group(*members(build))
    rows = members(build)
    rows.insert(place, broken_off(build))
    (expected,) = compute_advantages([whole], config).advantages
    result = compute_advantages([fail(build.group(*rows), place)], config)
    (got,) = result.advantages
    for values, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(values, other)
    assert any(values.any() for values in got)
    assert result.metrics == compute_advantages([whole], config).metrics


@pytest.mark.parametrize("config", CONFIGS)
def test_only_survivor_of_a_group_gets_zero(build, config):
    result = compute_advantages([fail(build.group(*members(build)), 1, 2)], config)
    assert [len(values) for values in result.advantages[0]] == [5]
    assert not result.advantages[0][0].any()
    alone = compute_advantages([build.group(members(build)[0])], AdvantageConfig(name="grpo"))
    assert alone.advantages[0][0].any()  # a group that was asked for one has its score, as upstream


@pytest.mark.parametrize("config", CONFIGS)
def test_group_of_failed_trajectories_is_empty(build, config):
    gone, whole = fail(build.group(*members(build)), 0, 1, 2), build.group(*members(build))
    result = compute_advantages([gone, whole], config)
    assert result.advantages[0] == []
    assert any(values.any() for values in result.advantages[1])
    assert all(np.isfinite(value) for value in result.metrics.values())


def test_failed_trajectory_may_have_any_score(build):
    rows = [*members(build), (float("nan"), False, [])]
    assert len(compute_advantages([fail(build.group(*rows), 3)], AdvantageConfig()).advantages[0]) == 3
