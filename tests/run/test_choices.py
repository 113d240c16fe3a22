"""What the start of a run and the doctor say of the choices in a config."""

from contextlib import nullcontext

import pytest
from config_rig import changed

from calibadv_jax.advantages.estimators import describe
from calibadv_jax.config import Config, LoraConfig
from calibadv_jax.contrib.commands import doctor
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.losses import check_loss
from calibadv_jax.run.choices import describe_choices


def choices(**sections):
    return describe_choices(changed(**sections))


def test_optional_features_are_described_when_on():
    plain = Config()
    assert choices() == [*describe(plain.advantage), *check_loss(plain.loss)]
    adapters = choices(policy={"lora": LoraConfig(rank=8, targets=["q", "v"])})[-1]
    assert adapters == "adapters ON: rank 8, alpha 32 at q, v; the base stays as it is, in bfloat16"
    text = "\n".join(choices(advantage={"name": "gae"}))
    assert "critic ON" in text and "learning rate 1e-05" in text
    for checks in (doctor.CHECKS, doctor.OFFLINE_CHECKS):
        assert dict(checks)["calibration"] is describe_choices


ALONE = {"group_size": 1}


@pytest.mark.parametrize(
    ("rollout", "advantage", "reward", "message"),
    [
        ({"max_searches": 0}, {}, {}, "max_searches is 0 .*reward.format=false"),
        ({"max_searches": 0}, {}, {"format": False}, ""),
        (ALONE, {}, {}, "group_size is 1, but advantage.name=calibadv .*every answer .* the advantage 0"),
        ({"group_size": 2}, {}, {}, ""),
        (ALONE, {"name": "gae"}, {}, ""),
        (ALONE, {"rebalance": False}, {}, ""),
        (ALONE, {"rebalance_within": "step"}, {}, ""),
        (ALONE, {"adjust": "clip"}, {}, ""),
    ],
)
def test_choices_that_teach_nothing_are_refused(rollout, advantage, reward, message):
    with pytest.raises(UserError, match=message) if message else nullcontext():
        assert choices(rollout=rollout, advantage=advantage, reward=reward)
