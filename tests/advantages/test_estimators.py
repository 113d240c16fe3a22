"""The stage's entry point; estimators where published code crashes or is undefined, descriptions, ties."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages, describe
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.registry import ESTIMATORS


def test_results_follow_the_order_of_groups_and_trajectories(build):
    first = build.group(build.member(0.0, answer=2), build.member(1.0, answer=3))
    second = build.group(build.member(1.0, answer=4), question_id="other")
    result = compute_advantages([first, second], AdvantageConfig())
    assert [[len(values) for values in group] for group in result.advantages] == [[2, 3], [4]]
    assert [credit.group for credit in result.credits] == [first, second]


def test_inputs_are_not_changed(build):
    group = build.group(build.member(0.0, "a"), build.member(1.0, "a"))
    before = [trajectory.response_ids for trajectory in group.trajectories]
    compute_advantages([group], AdvantageConfig())
    assert [trajectory.answer_score for trajectory in group.trajectories] == [0.0, 1.0]
    for trajectory, ids in zip(group.trajectories, before, strict=True):
        np.testing.assert_array_equal(trajectory.response_ids, ids)


def test_every_sampled_token_carries_its_trajectorys_advantage(build):
    """Observations carry none."""
    winner = [build.turn(num_tokens=2, num_observed=3), build.turn("answer")]
    loser = [build.turn("invalid", num_tokens=2, num_observed=1), build.turn("unfinished")]
    group = build.group((1.0, True, winner), (0.0, False, loser))
    (advantages,) = compute_advantages([group], AdvantageConfig(name="grpo")).advantages
    high = np.float32(0.5 / (np.sqrt(0.5) + 1e-6))
    np.testing.assert_array_equal(advantages[0], [high, high, 0, 0, 0, high])
    np.testing.assert_array_equal(advantages[1], [-high, -high, 0, -high])
    for values, trajectory in zip(advantages, group.trajectories, strict=True):
        assert values.dtype == np.float32
        assert values.shape == trajectory.response_ids.shape
        assert not values[~trajectory.mask].any()


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_score_that_is_not_finite_is_refused(build, score):
    group = build.group(build.member(score), build.member(0.0))
    with pytest.raises(ValueError, match="'q'.*not finite"):
        compute_advantages([group], AdvantageConfig(name="grpo"))


def test_mixed_questions_and_infinite_scores_are_refused(build):
    group = build.group(build.member(1.0), question_id="one")
    group.trajectories += build.group(build.member(0.0), question_id="two").trajectories
    with pytest.raises(ValueError, match="'two' is in the group of 'one'"):
        compute_advantages([group], AdvantageConfig())
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


@pytest.mark.parametrize("num_empty", [0, 1, 2])
def test_last_search_before_empty_turns_keeps_its_penalty(build, num_empty):
    empty = [build.turn("unfinished", num_tokens=0)] * num_empty
    lost = [build.turn(documents=["a"], num_tokens=4), *empty]
    group = build.group(build.member(1.0, "a", answer=2, observed=1), (0.0, True, lost))
    right, wrong = compute_advantages([group], AdvantageConfig(rebalance=False)).advantages[0]
    np.testing.assert_allclose(wrong, [-(0.5**0.5)] * 4, atol=1e-5)
    assert right[-1] == pytest.approx(0.5**0.5, abs=1e-5)


@pytest.mark.parametrize("num_empty", [0, 1])
def test_search_before_the_answer_turn_is_softened(build, num_empty):
    empty = [build.turn("unfinished", num_tokens=0)] * num_empty
    lost = [build.turn(documents=["a"], num_tokens=4), build.turn("answer", num_tokens=2), *empty]
    group = build.group(build.member(1.0, "a", answer=2, observed=1), (0.0, True, lost))
    wrong = compute_advantages([group], AdvantageConfig(rebalance=False)).advantages[0][1]
    np.testing.assert_allclose(wrong[:4], 0.0, atol=1e-12)
    assert (wrong[4:] < 0).all()


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
    failing, gone = build.group(*rows, failed=[place]), build.group(*members(build), failed=range(3))
    result = compute_advantages([failing], config)
    for values, other in zip(result.advantages[0], expected.advantages[0], strict=True):
        np.testing.assert_array_equal(values, other)
    assert any(values.any() for values in result.advantages[0])
    assert result.metrics == expected.metrics
    both = compute_advantages([gone, failing], config)
    assert both.advantages[0] == [] and any(values.any() for values in both.advantages[1])
    assert np.isfinite(list(both.metrics.values())).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_only_survivor_of_a_group_gets_nothing(build, config):
    result = compute_advantages([build.group(*members(build), failed=[1, 2])], config)
    assert [len(values) for values in result.advantages[0]] == [5]
    assert not result.advantages[0][0].any()


def test_group_that_was_asked_for_one_keeps_its_score(build):
    """As upstream."""
    (advantages,) = compute_advantages([build.group(members(build)[0])], CONFIGS[0]).advantages
    assert advantages[0].any()


@pytest.mark.parametrize("config", CONFIGS)
def test_group_without_survivors_is_empty(build, config):
    gone, whole = build.group(*members(build), failed=range(3)), build.group(*members(build))
    result = compute_advantages([gone, whole], config)
    assert result.advantages[0] == []
    assert any(values.any() for values in result.advantages[1])
    assert np.isfinite(list(result.metrics.values())).all()


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
    assert not {"advantage/answer/ratio_before", "advantage/correctness/mean"} & metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())


OVER_THE_STEP = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}  # by another mean than the group's


def raw(name, *groups, **settings):
    credits = compute_advantages(groups, AdvantageConfig(name=name, **settings)).credits
    return [credit.raw.tolist() for credit in credits]


@pytest.fixture
def of_scores(build):
    """A group of these scores; lengths: the tokens of each, 1 by default."""

    def of_scores(*scores, lengths=None, **more):
        pairs = zip(scores, lengths or [1] * len(scores), strict=True)
        return build.group(*(build.member(score, answer=length) for score, length in pairs), **more)

    return of_scores


def test_every_estimator_is_documented_with_its_source():
    page = (Path(__file__).parents[2] / "docs" / "credit.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|.*\| [^|]+ \|$", page, re.MULTILINE))
    assert documented >= ESTIMATORS.keys()


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"gae"}))
@pytest.mark.parametrize("score", [0.1, 2 / 3, 6 / 7])
def test_ties_are_exactly_zero(of_scores, name, score):
    """Those of the group, or of the step, where the mean is the step's."""
    groups = [
        of_scores(*[score] * size, lengths=range(1, size + 1), question_id=str(size)) for size in (2, 3, 5, 7)
    ]
    if name not in OVER_THE_STEP:
        groups.append(of_scores(1.0, 0.0, 0.3, lengths=[1, 2, 3], question_id="other"))
    for std_over in ("group", "step"):
        assert raw(name, *groups, std_over=std_over)[:4] == [[0.0] * size for size in (2, 3, 5, 7)]


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("score", [0.1, 2 / 3, 6 / 7, 1.0, 0.0])
def test_ties_of_any_size_are_exactly_zero(of_scores, size, score):
    assert raw("grpo", of_scores(*[score] * size)) == [[0.0] * size]


def test_grpo_by_hand(of_scores):
    # mean 1/2, std with Bessel's correction sqrt(1/2)
    advantage = 0.5 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(raw("grpo", of_scores(1.0, 0.0)), [[advantage, -advantage]])
    centred = raw("grpo", of_scores(1.0, 0.0, 0.5), normalize_std=False)
    np.testing.assert_allclose(centred, [[0.5, -0.5, 0.0]])
    # A group of one has mean 0 and std 1.
    assert raw("grpo", of_scores(0.6), of_scores()) == [[0.6 / (1 + 1e-6)], []]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [[0.75, -0.75, 0.0], [-0.8, 0.8]]),
        ("opo", [[1 - 3.5 / 8, -3.5 / 8, 0.5 - 3.5 / 8], [-0.4, 0.4]]),
        ("gpg", [[0.5 / 0.6, -0.5 / 0.6, 0.0], [-0.4 / 0.6, 0.4 / 0.6]]),
        ("dr_grpo", [[0.5, -0.5, 0.0], [-0.4, 0.4]]),
        ("grpo_passk", [[0.5, 0.0, 0.0], [0.0, 0.8]]),
    ],
)
def test_formula_by_hand(of_scores, name, expected):
    groups = of_scores(1.0, 0.0, 0.5, lengths=[1, 2, 5]), of_scores(0.0, 0.8, question_id="two")
    settings = {"normalize_std": False} if name == "grpo_passk" else {}
    for advantages, values in zip(raw(name, *groups, **settings), expected, strict=True):
        np.testing.assert_allclose(advantages, values, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("name", "expected"), [("grpo_neutral", -0.9), ("grpo_acceptable", 0)])
def test_near_miss_by_hand(of_scores, name, expected):
    ((_, near_miss, _),) = raw(name, of_scores(1.0, 0.7, 1.0), normalize_std=False)
    assert near_miss == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(OVER_THE_STEP))
def test_whitened_advantages_have_mean_0_and_variance_1(of_scores, name):
    """Over the sampled tokens of the step."""
    groups = [of_scores(1.0, 0.0, 0.5, lengths=[1, 2, 5]), of_scores(0.0, 0.8, question_id="two")]
    advantages = compute_advantages(groups, AdvantageConfig(name=name)).advantages
    tokens = np.concatenate([values for group in advantages for values in group]).astype(np.float64)
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.var(ddof=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_description_has_one_line_a_statement(name):
    assert not any("\n" in line for line in describe(AdvantageConfig(name=name)))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_nobody_has_a_sampled_token(build, name):
    members = [(score, True, [build.turn(num_tokens=0, num_observed=2)]) for score in (1.0, 0.0, 0.5)]
    groups = [build.group(*members, question_id=name) for name in "ab"]
    result = compute_advantages(groups, AdvantageConfig(name=name))
    assert all(np.isfinite(credit.raw).all() for credit in result.credits)
    assert not any(values.any() for group in result.advantages for values in group)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_groups_of_one(of_scores, name):
    """They keep their score, as upstream. pass@k, which raises there, gives 0; others need two values."""
    ((alone,),) = raw(name, of_scores(0.6))
    is_zero = name in {"grpo_passk", "igpo", "gae", *OVER_THE_STEP}
    assert alone == pytest.approx(0.0 if is_zero else 0.6, abs=1e-6)
    same = [of_scores(0.6, question_id=question) for question in "abc"]
    for value in raw(name, *same, std_over="step"):
        assert abs(value[0]) <= 0.6  # no division by the standard deviation of equal scores


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_only_survivor_does_not_count_in_the_step(of_scores, name):
    left = of_scores(1.0, 0.0, question_id="left", failed=[1])
    whole_groups = [of_scores(1.0, 0.0, 0.5, question_id="a"), of_scores(0.2, 0.7, question_id="b")]
    assert raw(name, left, *whole_groups) == [[0.0], *raw(name, *whole_groups)]
    assert raw(name, left) == [[0.0]]
    assert raw(name) == []


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_estimator_describes_itself(name):
    def formula(**switches):
        return describe(AdvantageConfig(name=name, **switches))[1]

    lines, calibrated = describe(AdvantageConfig(name=name)), describe(AdvantageConfig(base=name))
    assert lines[0].startswith(f"advantage {name}: ") and "no CalibAdv calibration" in lines[2]
    assert calibrated[:2] == [f"advantage calibadv: {name} calibrated by turn", formula()]
    assert formula().startswith("advantage = ") and " / (std" not in formula(normalize_std=False)
    assert formula(std_over="step") == formula().replace("(std +", "(std of the step's scores +")
    assert ("at least 0.4" in formula(score_threshold=0.4)) == (name in ("grpo_neutral", "grpo_acceptable"))


def test_loser_exactly_at_the_threshold_is_nearly_right(of_scores):
    group, settings = of_scores(1.0, 0.5, 0.75, 0.25), {"normalize_std": False, "score_threshold": 0.5}
    assert raw("grpo_neutral", group, **settings) == [[0.375, -0.625, 0.125, -0.375]]
    assert raw("grpo_acceptable", group, **settings) == [[0.375, 0.0, 0.125, -0.375]]
    average = of_scores(1.0, 0.5, 0.25, 0.25)  # 0.5 is the mean: no loser
    assert raw("grpo_neutral", average, **settings) == [[0.5, 0.0, -0.25, -0.25]]
    group = of_scores(2.0, 1.4, 1.3, 2.0)
    for trajectory in group.trajectories:
        trajectory.max_score = 2.0  # the threshold is relative to it
    ((*_, second, third, _),) = raw("grpo_acceptable", group, normalize_std=False)
    assert second == 0 > third


def test_querygroup_searches_of_equal_correctness_gain_nothing(build):
    group = build.group(build.member(1.0, "a"), build.member(0.0, "a"))
    (credit,) = compute_advantages([group], AdvantageConfig(name="querygroup")).credits
    assert credit.silver and not compute_advantages([group], AdvantageConfig(name="grpo")).credits[0].silver
    whole = 0.5 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(credit.turns, [[0.3 * whole, whole], [-0.3 * whole, -whole]], rtol=1e-12)


def test_whitening_adds_1e_8_to_the_variance(of_scores):
    """Two tokens 1e-4 apart: the variance is 5e-9, so that 1e-8 beside it decides."""
    (values,) = raw("reinforce_plus_plus", of_scores(0.0, 1e-4))
    np.testing.assert_allclose(values, [-0.5e-4 / np.sqrt(1.5e-8), 0.5e-4 / np.sqrt(1.5e-8)], rtol=1e-9)
