"""The stage's entry point."""

from __future__ import annotations

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Group


def test_groups_may_not_mix_questions(build):
    group = build.group(build.member(1.0), question_id="one")
    group.trajectories += build.group(build.member(0.0), question_id="two").trajectories
    with pytest.raises(ValueError, match="'two' is in the group of 'one'"):
        compute_advantages([group], AdvantageConfig())


def test_results_follow_the_order_of_groups_and_trajectories(build):
    first = build.group(build.member(0.0, answer=2), build.member(1.0, answer=3))
    second = build.group(build.member(1.0, answer=4), question_id="other")
    result = compute_advantages([first, second], AdvantageConfig())
    assert [[len(values) for values in group] for group in result.advantages] == [[2, 3], [4]]
    assert [credit.group for credit in result.credits] == [first, second]


def test_inputs_are_left_alone(build):
    group = build.group(build.member(0.0, "a"), build.member(1.0, "a"))
    before = [trajectory.response_ids for trajectory in group.trajectories]
    compute_advantages([group], AdvantageConfig())
    assert [trajectory.answer_score for trajectory in group.trajectories] == [0.0, 1.0]
    for trajectory, ids in zip(group.trajectories, before, strict=True):
        np.testing.assert_array_equal(trajectory.response_ids, ids)


def test_sampled_tokens_carry_the_trajectorys_advantage(build):
    group = build.group(
        (1.0, True, [build.turn(num_tokens=2, num_observed=3), build.turn("answer", num_tokens=1)]),
        (0.0, False, [build.turn("invalid", num_tokens=2, num_observed=1), build.turn("unfinished")]),
    )
    result = compute_advantages([group], AdvantageConfig(name="grpo"))
    high = np.float32(0.5 / (np.sqrt(0.5) + 1e-6))
    (first, second), trajectories = result.advantages[0], group.trajectories
    np.testing.assert_array_equal(first, [high, high, 0, 0, 0, high])
    np.testing.assert_array_equal(second, [-high, -high, 0, -high])
    for values, trajectory in zip((first, second), trajectories, strict=True):
        assert values.dtype == np.float32
        assert values.shape == trajectory.response_ids.shape
        assert not values[~trajectory.mask].any()


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_scores_must_be_finite(build, score):
    group = build.group(build.member(score), build.member(0.0))
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


def fail(group, *indices):
    for index in indices:
        group.trajectories[index].error = "retriever: gone"
    return Group.of(group.question, group.trajectories)


def members(build):
    """Scores 1, 0.5 and 0, searches among silver and other documents, answers of different lengths."""
    rows = [(1.0, "ab", 2), (0.5, "cx", 3), (0.0, "ax", 4)]
    return [build.member(score, shown, answer=length, observed=2) for score, shown, length in rows]


def broken_off(build):
    """It had a good score and the silver documents' best, but does not count."""
    return (1.0, True, [build.turn(documents=["x", "y"], num_tokens=3)])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("place", [0, 2, 3])
def test_failed_trajectory_changes_no_other(build, config, place):
    whole = build.group(*members(build))
    rows = members(build)
    rows.insert(place, broken_off(build) if place < 3 else (float("nan"), False, []))
    (expected,) = compute_advantages([whole], config).advantages
    result = compute_advantages([fail(build.group(*rows), place)], config)
    (got,) = result.advantages
    for values, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(values, other)
    assert any(values.any() for values in got)
    assert result.metrics == compute_advantages([whole], config).metrics


@pytest.mark.parametrize("config", CONFIGS)
def test_group_of_failed_trajectories_is_empty(build, config):
    gone, whole = fail(build.group(*members(build)), 0, 1, 2), build.group(*members(build))
    result = compute_advantages([gone, whole], config)
    assert result.advantages[0] == []
    assert any(values.any() for values in result.advantages[1])
    assert all(np.isfinite(value) for value in result.metrics.values())


def test_metrics(build):
    mixed = build.group(
        (1.0, True, [build.turn(documents=["a", "b"], num_tokens=3), build.turn("answer", num_tokens=2)]),
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
    right = build.group(*[build.member(1.0, "c")] * 2, question_id="right")
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


def test_nothing_to_measure(build):
    assert compute_advantages([build.group()], AdvantageConfig()).credits[0].raw.tolist() == []
    metrics = compute_advantages([], AdvantageConfig()).metrics
    assert metrics["advantage/answer/positive_before"] == 0
    assert "advantage/answer/ratio_before" not in metrics
    assert "advantage/correctness/mean" not in metrics
    assert all(isinstance(value, float) for value in metrics.values())
