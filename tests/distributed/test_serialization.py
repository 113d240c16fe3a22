"""Values that processes exchange: what is restored, and what is refused."""

import pickle

import numpy as np
import pytest

from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn
from calibadv_jax.distributed.serialization import from_bytes, to_bytes


def test_trajectories_are_restored_and_nothing_else():
    question, tokens = Question("q", "who?", ("Ann",), "toy"), np.arange(3, dtype=np.int32)
    turn = Turn("search", tokens, np.float32([-1, -2, -0.1]), documents=(Document("1", "T", "x"),))
    group = Group.from_attempts(
        question, [Trajectory(question, tokens, [turn], metrics={"judge": np.float64(0.5)})]
    )
    restored = from_bytes(to_bytes({3: group}))[3]
    assert restored.question == question and restored.trajectories[0].turns[0].documents == turn.documents
    assert restored.trajectories[0].turns[0].logprobs.tobytes() == turn.logprobs.tobytes()
    assert restored.trajectories[0].metrics == {"judge": 0.5}
    restored.trajectories[0].turns[0].logprobs[0] = 0  # it is an array of its own

    class Harm:
        def __reduce__(self):
            return eval, ("1/0",)

    for sent in (Harm(), np.array([Harm()], object), {"a": [pickle.loads]}):
        with pytest.raises(pickle.UnpicklingError, match="do not exchange such values"):
            from_bytes(pickle.dumps(sent))
