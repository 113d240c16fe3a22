"""What the start of a run and the doctor say of the choices in a config."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from calibadv_jax.advantages.estimators import describe
from calibadv_jax.config import Config
from calibadv_jax.contrib.commands import doctor
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.losses import check_loss
from calibadv_jax.run.choices import describe_choices


def test_defaults_describe_credit_and_loss_only():
    plain = Config()
    assert describe_choices(plain) == [*describe(plain.advantage), *check_loss(plain.loss)]


def test_optional_features_are_described_when_on():
    plain = Config()
    reward = replace(plain.reward, overlong_penalty=1, overlong_from=100, overlong_until=200)
    data, rollout = replace(plain.data, rest_above=0.9), replace(plain.rollout, replace_tied=7)
    policy = replace(plain.policy, lora=replace(plain.policy.lora, rank=8, targets=["q", "v"]))
    lora, *output = describe_choices(
        replace(plain, reward=reward, data=data, rollout=rollout, policy=policy)
    )[-4:]
    assert lora == "adapters ON: rank 8, alpha 32 at q, v; the base stays as it is, in bfloat16"
    assert "from 100 sampled tokens" in output[0] and "by 1 at 200" in output[0]
    assert "up to 7 further questions" in output[1]
    assert "below 0 or above 0.9" in output[2]


def test_format_reward_without_searches_is_refused():
    plain = Config()
    without = replace(plain, rollout=replace(plain.rollout, max_searches=0))
    with pytest.raises(UserError, match="max_searches is 0 .*reward.format=false"):
        describe_choices(without)
    assert describe_choices(replace(without, reward=replace(plain.reward, format=False)))


ALONE = {"group_size": 1}


@pytest.mark.parametrize(
    ("rollout", "advantage", "message"),
    [
        (ALONE, {}, "group_size is 1, but advantage.name=calibadv .*every answer would have the advantage 0"),
        (ALONE | {"replace_tied": 3}, {"name": "gae"}, "replace_tied=3 of them would be thrown away"),
        ({"group_size": 2, "replace_tied": 3}, {}, ""),
        (ALONE, {"name": "gae"}, ""),
        (ALONE, {"rebalance": False}, ""),
        (ALONE, {"rebalance_within": "step"}, ""),
        (ALONE, {"adjust": "clip"}, ""),
    ],
)
def test_single_trajectory_groups_are_refused_by_group_estimators(rollout, advantage, message):
    plain = Config()
    config = replace(
        plain, rollout=replace(plain.rollout, **rollout), advantage=replace(plain.advantage, **advantage)
    )
    with pytest.raises(UserError, match=message) if message else nullcontext():
        describe_choices(config)


def test_critic_is_described():
    plain = Config()

    def described(**advantage):
        config = replace(plain, advantage=replace(plain.advantage, **advantage))
        return "\n".join(describe_choices(replace(config, critic=replace(plain.critic, warmup_steps=3))))

    text = described(base="gae")
    for words in ("critic ON", "learning rate 1e-05", "first 3 steps", "moves all of them"):
        assert words in text
    assert "critic ON" in described(name="gae") and "moves all" not in described(name="gae")


def test_doctor_describes_the_same_choices():
    for checks in (doctor.CHECKS, doctor.OFFLINE_CHECKS):
        assert dict(checks)["calibration"] is describe_choices
