"""What trajectories did: how stale the policies were that wrote them, and how many answered."""

import numpy as np

from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.metrics.summary import trajectory_metrics

QUESTION = Question("q", "?", ("x",), "test")
NOTHING = np.zeros(1, np.int32)


def written_by(*versions):
    turn = Turn("answer", NOTHING, np.zeros(1, np.float32), policy_versions=versions)
    return Trajectory(QUESTION, NOTHING, [turn])


def test_the_oldest_version_of_each_trajectory_counts():
    metrics = trajectory_metrics([Group(QUESTION, [written_by(3, 5), written_by(5), written_by()])], step=5)
    staleness = {name: metrics[f"rollout/staleness/{name}"] for name in ("max", "min", "mean")}
    assert staleness == {"max": 2, "min": 0, "mean": 1}
    assert metrics["rollout/mixed_versions"] == 0.5


def test_versions_that_are_not_known_are_not_reported():
    assert "rollout/staleness/max" not in trajectory_metrics([Group(QUESTION, [written_by()])], step=5)


def test_a_wrong_answer_is_an_answer():
    wrong, silent = written_by(1), Trajectory(QUESTION, NOTHING)
    wrong.turns[0].answer = "y"
    assert trajectory_metrics([Group(QUESTION, [wrong, silent])])["rollout/answered"] == 0.5
