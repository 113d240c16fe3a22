"""What the start of a run and the doctor say of the choices in a config."""

from dataclasses import replace

from calibadv_jax.advantages.estimators import describe
from calibadv_jax.commands import doctor, offline_checks
from calibadv_jax.config import Config
from calibadv_jax.learner.losses import check_loss
from calibadv_jax.run.choices import describe_choices


def test_by_default_only_credit_and_loss_are_spoken_of():
    plain = Config()
    assert describe_choices(plain) == [*describe(plain.advantage), *check_loss(plain.loss)]


def test_what_is_switched_on_is_said():
    plain = Config()
    reward = replace(plain.reward, overlong_penalty=1, overlong_from=100, overlong_until=200)
    data, rollout = replace(plain.data, rest_above=0.9), replace(plain.rollout, replace_tied=7)
    said = describe_choices(replace(plain, reward=reward, data=data, rollout=rollout))[-3:]
    assert "from 100 sampled tokens" in said[0] and "by 1 at 200" in said[0]
    assert "up to 7 further questions" in said[1]
    assert "below 0 or above 0.9" in said[2]


def test_a_critic_is_spoken_of():
    plain = Config()
    advantage = replace(plain.advantage, base="gae")
    said = describe_choices(replace(plain, advantage=advantage, critic=replace(plain.critic, warmup_steps=3)))
    text = "\n".join(said)
    assert "critic ON" in text and "learning rate 1e-05" in text and "first 3 steps" in text
    assert "moves all of them" in text
    alone = "\n".join(describe_choices(replace(plain, advantage=replace(plain.advantage, name="gae"))))
    assert "critic ON" in alone and "moves all" not in alone


def test_the_doctor_says_the_same():
    for checks in (doctor.CHECKS, offline_checks.OFFLINE_CHECKS):
        assert dict(checks)["calibration"] is describe_choices
