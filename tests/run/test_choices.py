"""What the start of a run and the doctor say of the choices in a config."""

from contextlib import nullcontext

import pytest
from config_rig import changed

from calibadv_jax.advantages.estimators import describe
from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.losses import check_loss
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
