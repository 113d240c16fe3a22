"""What the start of a run and the doctor say of the choices in a config."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from config_rig import changed

from calibadv_jax.advantages.estimators import compute_advantages, describe
from calibadv_jax.config import Config
from calibadv_jax.contrib.cli import doctor
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.learner.losses import check_loss
from calibadv_jax.rewards.score import score_trajectory
from calibadv_jax.run.choices import describe_choices


def choices(**sections):
    return describe_choices(changed(**sections))


def test_credit_and_loss_are_described():
    plain = Config()
    assert choices() == [*describe(plain.advantage), *check_loss(plain.loss)]


ALONE = {"group_size": 1}


@pytest.mark.parametrize(
    ("rollout", "advantage", "reward", "message"),
    [
        ({"max_searches": 0}, {}, {}, "max_searches is 0 .*reward.format=false"),
        ({"max_searches": 0}, {}, {"format": False}, ""),
        (ALONE, {}, {}, "group_size is 1, but advantage.name=calibadv .*every answer .* the advantage 0"),
        ({"group_size": 2}, {}, {}, ""),
        (
            ALONE | {"dynamic_sampling": 3},
            {"name": "gae"},
            {},
            "group_size=1 ties every group; .*dynamic_sampling=0",
        ),
        ({"group_size": 2, "dynamic_sampling": 3}, {}, {}, ""),
        (ALONE, {"name": "gae"}, {}, ""),
        (ALONE, {"rebalance": False}, {}, ""),
        (ALONE, {"rebalance_within": "step"}, {}, ""),
        (ALONE, {"adjust": "clip"}, {}, ""),
    ],
)
def test_choices_that_teach_nothing_are_refused(rollout, advantage, reward, message):
    with pytest.raises(UserError, match=message) if message else nullcontext():
        assert choices(rollout=rollout, advantage=advantage, reward=reward)


def alone(**fields):
    """A trajectory of a group of one, which answers at once and is right."""
    text = "<think>t</think><answer>Ann</answer>"
    turn = Turn("answer", np.ones(1, np.int32), np.zeros(1, np.float32), text=text, answer="Ann")
    return Trajectory(Question("1", "Who?", ("Ann",), "test"), np.ones(1, np.int32), [turn], **fields)


def test_refusal_without_searches_names_the_score():
    with pytest.raises(UserError, match="max_searches is 0 .*every trajectory would score 0"):
        choices(rollout={"max_searches": 0})


@pytest.mark.parametrize(("checks_format", "score"), [(True, 0), (False, 1)])
def test_answer_without_a_search_scores_only_without_format(checks_format, score):
    """The reason why a run without searches is refused."""
    reward = replace(Config().reward, format=checks_format)
    assert score_trajectory(alone(), reward).answer_score == score


@pytest.mark.parametrize(("rebalance", "advantage"), [(True, 0), (False, 1)])
def test_balanced_group_of_one_has_no_answer_advantage(rebalance, advantage):
    """The reason why a group of one is refused."""
    trajectory = alone(answer_score=1.0, format_valid=True)
    group = Group(trajectory.question, [trajectory])
    result = compute_advantages([group], replace(Config().advantage, rebalance=rebalance))
    assert result.advantages[0][0][0] == pytest.approx(advantage, rel=1e-5)


def test_doctor_checks_the_same_choices():
    for checks in (doctor.CHECKS, doctor.OFFLINE_CHECKS):
        assert checks["calibration"] is describe_choices
