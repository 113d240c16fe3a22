"""The stage's entry point."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig


def test_import_needs_neither_jax_nor_pydantic():
    code = "import sys; import calibadv_jax.advantages.estimators; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {module.partition(".")[0] for module in output.split()}
    assert "numpy" in loaded and not loaded & {"jax", "flax", "vllm", "pydantic", "omegaconf"}


def test_groups_may_not_mix_questions(build):
    group = build.group((1.0, True, [build.turn("answer")]), question_id="one")
    group.trajectories += build.group((0.0, True, [build.turn("answer")]), question_id="two").trajectories
    with pytest.raises(ValueError, match="'two' is in the group of 'one'"):
        compute_advantages([group], AdvantageConfig())


def test_results_follow_the_order_of_groups_and_trajectories(build):
    first = build.group(
        (0.0, True, [build.turn("answer", num_tokens=2)]), (1.0, True, [build.turn("answer", num_tokens=3)])
    )
    second = build.group((1.0, True, [build.turn("answer", num_tokens=4)]), question_id="other")
    result = compute_advantages([first, second], AdvantageConfig())
    assert [[len(values) for values in group] for group in result.advantages] == [[2, 3], [4]]
    assert [credit.group for credit in result.credits] == [first, second]


def test_inputs_are_left_alone(build):
    group = build.group(
        (0.0, True, [build.turn(documents=["a"]), build.turn("answer")]),
        (1.0, True, [build.turn(documents=["a"]), build.turn("answer")]),
    )
    before = [trajectory.response_ids for trajectory in group.trajectories]
    compute_advantages([group], AdvantageConfig())
    assert [trajectory.answer_score for trajectory in group.trajectories] == [0.0, 1.0]
    for trajectory, ids in zip(group.trajectories, before, strict=True):
        np.testing.assert_array_equal(trajectory.response_ids, ids)
