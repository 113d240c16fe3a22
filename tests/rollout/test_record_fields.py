"""A kept trajectory says what was paid for, and not what the answer alone would have earned."""

import numpy as np

from calibadv_jax.rollout.record import trajectory_to_json
from calibadv_jax.trajectory import Question, Trajectory, Turn


def test_every_field_is_its_own():
    question = Question("q1", "Who?", ("Ann", "Ann Lee"), "nq")
    turn = Turn(
        "answer", np.arange(3), np.zeros(3), text="<answer>Ann</answer>", answer="Ann", policy_versions=(4,)
    )
    trajectory = Trajectory(question, np.arange(5), [turn], index=2, seconds=1.23456)
    trajectory.format_valid, trajectory.answer_score = True, 0.25
    trajectory.metrics = {"f1": 0.5, "em": 0.0}
    row = trajectory_to_json(trajectory)
    (kept,) = row.pop("turns")
    assert row == {
        "question": "Who?",
        "question_id": "q1",
        "data_source": "nq",
        "golden_answers": ["Ann", "Ann Lee"],
        "index": 2,
        "error": None,
        "answer": "Ann",
        "answer_score": 0.25,
        "format_valid": True,
        "metrics": {"f1": 0.5, "em": 0.0},
        "policy_versions": [4],
        "num_prompt_tokens": 5,
        "seconds": 1.235,
    }
    assert (kept["kind"], kept["num_tokens"], kept["num_observation_tokens"]) == ("answer", 3, 0)
