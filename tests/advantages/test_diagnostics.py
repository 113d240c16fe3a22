"""Metrics of a step, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig


def test_metrics(build):
    mixed = build.group(
        (
            1.0,
            True,
            [build.turn(documents=["a", "b"], num_tokens=3), build.turn("answer", num_tokens=2)],
        ),
        (
            0.0,
            True,
            [
                build.turn(documents=["a", "x"], num_tokens=5),
                build.turn(documents=["y"], num_tokens=1),
                build.turn("answer", num_tokens=4),
            ],
        ),
        question_id="mixed",
    )
    wrong = build.group(*[(0.0, False, [build.turn("invalid")])] * 2, question_id="wrong")
    right = build.group(
        *[(1.0, True, [build.turn(documents=["c"]), build.turn("answer")])] * 2, question_id="right"
    )
    single = build.group(
        (1.0, True, [build.turn(num_tokens=6), build.turn("answer", num_tokens=7)]), question_id="single"
    )
    for trajectory in right.trajectories:  # 2 of 2
        trajectory.answer_score = trajectory.max_score = 2.0
    for trajectory in single.trajectories:  # 1 of 2
        trajectory.max_score = 2.0
    metrics = compute_advantages([mixed, wrong, right, single], AdvantageConfig()).metrics
    advantage = 0.5 / (np.sqrt(0.5) + 1e-6)
    alone = 1 / (1 + 1e-6)
    expected = {
        "groups/all_wrong_share": 1 / 4,
        "groups/all_right_share": 1 / 4,
        "groups/one_sided_share": 1 / 4,
        "answer/positive_before": 2 * advantage + 7 * alone,
        "answer/negative_before": 4 * advantage,
        "answer/ratio_before": 4 * advantage / (2 * advantage + 7 * alone),
        "answer/positive_after": 4 * advantage,
        "answer/negative_after": 4 * advantage,
        "answer/ratio_after": 1.0,
        "search/negative_before": 6 * advantage,
        "search/negative_after": (2.5 + 1) * advantage,
        "search/softened_share": 1 / 2,
        "correctness/mean": (1 + 1 / 2 + 0 + 1 + 1) / 5,  # `single` has no silver set
        "correctness/zero_share": 1 / 5,
        "correctness/to_one_third_share": 0,
        "correctness/to_two_thirds_share": 1 / 5,
        "correctness/to_one_share": 3 / 5,
        "silver/group_share": 2 / 4,
        "silver/size_mean": 1.5,
        "tokens/search_positive": 3 + 6,
        "tokens/search_negative": 5 + 1,
        "tokens/answer_positive": 2,
        "tokens/answer_negative": 4,
        "skipped_trajectories": 0,
        # mixed: searches +A on 3, -A / 2 on 5, -A on 1, answers +2A on 2, -A on 4; single: 6 of 13; 6 zeros
        "mean": ((3 - 2.5 - 1 + 4 - 4) * advantage + 6 * alone) / (15 + 13 + 6),
        "max": 2 * advantage,
        "min": -advantage,
    }
    assert metrics == pytest.approx({f"advantage/{name}": value for name, value in expected.items()})


def test_nothing_to_measure():
    metrics = compute_advantages([], AdvantageConfig()).metrics
    assert metrics["advantage/answer/positive_before"] == 0
    assert "advantage/answer/ratio_before" not in metrics
    assert "advantage/correctness/mean" not in metrics
    assert all(isinstance(value, float) for value in metrics.values())
