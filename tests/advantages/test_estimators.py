"""The stage's entry point."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig


def test_groups_may_not_mix_questions(build):
    group = build.group(build.member(1.0), question_id="one")
    group.trajectories += build.group(build.member(0.0), question_id="two").trajectories
    with pytest.raises(ValueError, match="'two' is in the group of 'one'"):
        compute_advantages([group], AdvantageConfig())


def test_scores_must_be_finite(build):
    group = build.group(build.member(float("inf")), build.member(0.0))
    with pytest.raises(ValueError, match="'q'.*not finite"):
        compute_advantages([group], AdvantageConfig(name="grpo"))


@pytest.mark.parametrize("num_empty", [0, 1, 2])
@pytest.mark.parametrize("is_last", [True, False])
def test_empty_last_turns_do_not_count(build, num_empty, is_last):
    """The last sampled turn is the answer turn: a search there is balanced and not softened."""
    later = [] if is_last else [build.turn("answer", num_tokens=2)]
    empty = [build.turn("unfinished", num_tokens=0)] * num_empty
    lost = [build.turn(documents=["a"], num_tokens=4), *later, *empty]
    group = build.group(build.member(1.0, "a", answer=2, observed=1), (0.0, True, lost))
    result = compute_advantages([group], AdvantageConfig())
    assert result.credits[0].correctness[1][0] == 1.0  # it found the silver document
    assert result.credits[0].raw.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)
    right, wrong = result.advantages[0]
    assert wrong[0] == pytest.approx(-(0.5**0.5) if is_last else 0, abs=1e-5) and wrong[-1] < 0
    assert right[-1] == pytest.approx(0.5**0.5 * (2 if is_last else 1), abs=1e-5)
    (of_turns,) = compute_advantages([group], AdvantageConfig(name="gigpo")).credits
    assert of_turns.raw[1] == of_turns.before[1][len(lost) - num_empty - 1]


CONFIGS = [
    AdvantageConfig(name="grpo"),
    AdvantageConfig(),
    AdvantageConfig(adjust="negative", target_ratio=2),
]


def members(build):
    """Scores 1, 0.5 and 0, searches among silver and other documents, answers of different lengths."""
    rows = [(1.0, "ab", 2), (0.5, "cx", 3), (0.0, "ax", 4)]
    return [build.member(score, shown, answer=length, observed=2) for score, shown, length in rows]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("place", [0, 2, 3])
def test_failed_trajectory_changes_no_other(build, config, place):
    """Though it had a good score and the silver documents' best, or a score that is no number."""
    whole, rows = build.group(*members(build)), members(build)
    broken_off = (1.0, True, [build.turn(documents=["x", "y"], num_tokens=3)])
    rows.insert(place, broken_off if place < 3 else (float("nan"), False, []))
    expected = compute_advantages([whole], config)
    result = compute_advantages([build.group(*rows, failed=[place])], config)
    for values, other in zip(result.advantages[0], expected.advantages[0], strict=True):
        np.testing.assert_array_equal(values, other)
    assert any(values.any() for values in result.advantages[0])
    assert result.metrics == expected.metrics


@pytest.mark.parametrize("config", CONFIGS)
def test_group_of_failed_trajectories_is_empty(build, config):
    gone, whole = build.group(*members(build), failed=range(3)), build.group(*members(build))
    result = compute_advantages([gone, whole], config)
    assert result.advantages[0] == []
    assert any(values.any() for values in result.advantages[1])
    assert all(np.isfinite(value) for value in result.metrics.values())


def test_metrics(build):
    turn = build.turn
    won = [turn(documents="ab", num_tokens=3), turn("answer", num_tokens=2)]
    lost = [turn(documents="ax", num_tokens=5), turn(documents="y"), turn("answer", num_tokens=4)]
    mixed = build.group((1.0, True, won), (0.0, True, lost))
    wrong = build.group(*[(0.0, False, [turn("invalid")])] * 2)
    right = build.group(*[build.member(2.0, "c")] * 2)
    single = build.group((1.0, True, [turn(num_tokens=6), turn("answer", num_tokens=7)]))
    for trajectory in right.trajectories + single.trajectories:  # 2 of 2, and 1 of 2
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


def test_nothing_to_measure(build):
    assert compute_advantages([build.group()], AdvantageConfig()).credits[0].raw.tolist() == []
    metrics = compute_advantages([], AdvantageConfig()).metrics
    assert metrics["advantage/answer/positive_before"] == 0
    assert "advantage/answer/ratio_before" not in metrics
    assert "advantage/correctness/mean" not in metrics
    assert all(isinstance(value, float) for value in metrics.values())
