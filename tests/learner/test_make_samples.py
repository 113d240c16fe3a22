"""Which trajectories become samples."""

from __future__ import annotations

import numpy as np

from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.learner.step import make_samples


def trajectory(length: int) -> Trajectory:
    ids = np.arange(length, dtype=np.int32)
    turn = Turn(
        "search", ids, np.full(length, -0.5, np.float32), observation_ids=np.arange(2, dtype=np.int32)
    )
    return Trajectory(Question("q", "?", ("x",), "test"), np.zeros(3, np.int32), [turn])


def test_what_has_no_token_of_its_own_is_not_trained():
    trajectories = [trajectory(4), trajectory(0), trajectory(6)]
    advantages = [np.full(len(one.response_ids), number + 1.0) for number, one in enumerate(trajectories)]
    samples, skipped = make_samples(trajectories, advantages)
    assert skipped == 1
    assert [int(sample.mask.sum()) for sample in samples] == [4, 6]
    assert [float(sample.advantages[-1]) for sample in samples] == [1.0, 3.0]
