"""Training with tied groups replaced, and with a curriculum: the same questions, resumed or not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from trainer_rig import (
    ScriptedRollouts,
    make_config,
    make_state,
    resumed,
    rows,
    run,
    shared_programs,  # noqa: F401
)

from calibadv_jax.config import RewardConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.hosts.exchange import Hosts
from calibadv_jax.record.reader import find_step, read_step

pytestmark = pytest.mark.medium


class SomeTied(ScriptedRollouts):
    """Groups 0, 3, 4 and 9 are wrong throughout; group 2 is right throughout."""

    answers = dict.fromkeys((0, 3, 4, 9), "no") | {2: "yes"}

    def begin(self, number, question):
        future = super().begin(number, question)
        if number in self.answers and not future.exception():
            for trajectory in future.result().trajectories:
                trajectory.turns[-1] = reply_of(trajectory.turns[-1], self.answers[number])
        return future


def reply_of(turn, answer):
    text = f"<think>t</think><answer>{answer}</answer>"
    return dataclasses.replace(turn, text=text, answer=answer)


def config_of(folder, **data):
    return make_config(folder, rollout={"replace_tied": 2}, data=data)


def asked(folder, step):
    return [group.question.id for group in read_step(find_step(folder, step)).groups]


def test_tied_groups_are_replaced_alike_after_resume(tmp_path):
    whole = run(config_of(tmp_path / "a"), SomeTied(), tmp_path / "a")
    assert [number for number, _ in whole.begun] == list(range(12))
    # Step 1: 0 gives way to 2, and that to 3, which is tied too, but then two were replaced.
    result = rows(tmp_path / "a")
    assert [row["rollout/replaced_groups"] for row in result] == [2, 1, 0, 1]
    assert [row["group/tied"] for row in result] == [0.5, 0, 0, 0]
    second = resumed(config_of(tmp_path / "b"), tmp_path / "b", 10, SomeTied)
    assert rows(tmp_path / "b") == result
    assert second.begun == whole.begun[9:]
    np.testing.assert_equal(second.loaded[-1][1], whole.loaded[-1][1])


def test_curriculum_rests_questions_alike_after_resume(tmp_path):
    data = {"shuffle": False, "rest_below": 0.2, "rest_above": 0.9}
    whole = run(config_of(tmp_path / "a", **data), SomeTied(), tmp_path / "a")
    # Of seven questions q0, q2, q3 and q4 were wrong or right throughout and rest in the second epoch.
    assert [name for _, name in whole.begun] == [f"q{number}" for number in (*range(7), 1, 5, 6, 0, 1)]
    assert [row["rollout/resting_questions"] for row in rows(tmp_path / "a")] == [3, 4, 0, 1]
    resumed(config_of(tmp_path / "b", **data), tmp_path / "b", 8, SomeTied)
    assert rows(tmp_path / "b") == rows(tmp_path / "a")
    for step in range(1, 5):
        assert asked(tmp_path / "a", step) == asked(tmp_path / "b", step)


def test_curriculum_compares_with_the_largest_reward(tmp_path):
    """Scores of 2 out of 2 are a mean of 1, scores of 1 out of 2 are not above 0.9."""
    begun = []
    for number, answer in enumerate(({"f1": 1.0}, {"f1": 1.0, "em": 1.0}, {"f1": 0.25})):
        data, folder = {"shuffle": False, "rest_below": 0.2, "rest_above": 0.9}, tmp_path / str(number)
        config = dataclasses.replace(config_of(folder, **data), reward=RewardConfig(answer))
        begun.append(run(config, SomeTied(), folder).begun)
        assert [row["rollout/resting_questions"] for row in rows(folder)] == [3, 4, 0, 1]
    assert begun[0] == begun[1] == begun[2]


class AnotherScore(Hosts):
    """Another process scores a group otherwise: it would ask for other groups."""

    def same(self, what, value):
        if what == "score of a group":
            assert value() == [[0.0] * 3, [1.0, 0.0, 0.0]]
            raise UserError(f"process 1 has another {what} than process 0")


def test_scores_of_tied_groups_are_compared_across_processes(tmp_path):
    rollouts = SomeTied()
    state = make_state(config_of(tmp_path), tmp_path, rollouts)
    state.hosts = AnotherScore()
    with pytest.raises(UserError, match="another score of a group"):
        state.stream.take(0)
    assert [number for number, _ in rollouts.begun] == [0, 1]
