"""PPO: a critic is trained, saved and asked beside the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from trainer_rig import (
    ScriptedRollouts,
    make_config,
    resumed,
    rows,
    run,
    shared_programs,  # noqa: F401
)

from calibadv_jax.config import CriticConfig, OptimizerConfig
from calibadv_jax.record.reader import find_step, read_step
from calibadv_jax.tools.replay import equal_turns, kept_config, replay

pytestmark = pytest.mark.medium
RATE = OptimizerConfig(lr=0.05, schedule="constant")


def critic_config(folder, advantage=None, **critic):
    learner = {"steps": 4, "row_length": 16, "microbatch_rows": 8, "row_widths": 1, "optimizer": RATE}
    critic = {"optimizer": RATE} | critic
    return make_config(folder, learner=learner, advantage=advantage or {"name": "gae"}, critic=critic)


def test_a_resumed_run_is_the_same_and_is_replayed(tmp_path):
    whole = run(critic_config(tmp_path / "a", warmup_steps=1), ScriptedRollouts(), tmp_path / "a")
    second = resumed(critic_config(tmp_path / "b", warmup_steps=1), tmp_path / "b", 5)
    np.testing.assert_equal(second.loaded[-1][1], whole.loaded[-1][1])
    written = rows(tmp_path / "a")
    assert written == rows(tmp_path / "b")
    print(written[0], written[-1])
