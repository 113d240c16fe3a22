"""What holds for every combination of switches, on generated groups."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from calibadv_jax.advantages.credit import answer_turn_sums, last_sampled_turn, positive_negative_sums
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.registry import ESTIMATORS

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

SCORES = st.sampled_from([0.0, 0.2, 0.5, 2 / 3, 0.7, 6 / 7, 1.0])
CONFIGS = st.builds(
    AdvantageConfig,
    base=st.sampled_from(sorted(ESTIMATORS)),
    normalize_std=st.booleans(),
    std_over=st.sampled_from(["group", "step"]),
    score_threshold=st.sampled_from([0.2, 0.5, 0.7]),
    turn_weight=st.sampled_from([0.0, 0.5, 1.0]),
    discount=st.sampled_from([0.5, 0.95, 1.0]),
    soft_penalty=st.booleans(),
    silver_threshold=st.sampled_from([0.0, 0.5, 0.7, 1.0]),
    correctness=st.sampled_from(["fraction", "max", "mean"]),
    rebalance=st.booleans(),
    target_ratio=st.floats(0.05, 20),
    adjust=st.sampled_from(["positive", "negative"]),
)
TURNS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["search", "search", "search", "answer", "invalid", "unfinished"]),
        "think": st.lists(st.sampled_from("abc"), max_size=5).map(" ".join),
        "documents": st.lists(st.sampled_from("stuvwxyz"), max_size=3),
        "num_tokens": st.integers(0, 4),
        "num_observed": st.integers(0, 3),
        "golden": st.sampled_from([-3.0, -1.0, -0.5, 0.0]),
    }
)
MEMBERS = st.tuples(SCORES, st.booleans(), st.lists(TURNS, max_size=5))
STEPS = st.lists(st.lists(MEMBERS, min_size=1, max_size=6), min_size=1, max_size=3)
EXAMPLES = hypothesis.settings(max_examples=40)
VARIANTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["calibadv", *ESTIMATORS]),
        "softening": st.sampled_from(["plain", "aggressive", "upper_limit", "reset"]),
        "rebalance_over": st.sampled_from(["answer", "turn", "all"]),
        "rebalance_within": st.sampled_from(["group", "step"]),
        "rebalance_by": st.sampled_from(["advantage", "tokens"]),
        "rebalance_excess": st.booleans(),
        "adjust": st.sampled_from(["positive", "negative", "clip"]),
    }
)


def build_step(build, step):
    return [
        build.group(
            *((score, valid, [build.turn(**turn) for turn in turns]) for score, valid, turns in members),
            question_id=f"q{index}",
        )
        for index, members in enumerate(step)
    ]


@EXAMPLES
@hypothesis.given(step=STEPS, config=CONFIGS)
def test_tokens_signs_and_magnitudes(build, step, config):
    groups = build_step(build, step)
    result = compute_advantages(groups, config)
    assert all(np.isfinite(value) for value in result.metrics.values())
    for group, advantages, credit in zip(groups, result.advantages, result.credits, strict=True):
        for index, trajectory in enumerate(group.trajectories):
            assert advantages[index].shape == trajectory.mask.shape
            assert not advantages[index][~trajectory.mask].any()
            assert ((credit.correctness[index] >= 0) & (credit.correctness[index] <= 1)).all()
            last = last_sampled_turn(trajectory)
            pairs = zip(credit.before[index], credit.turns[index], strict=True)
            for position, (raw, value) in enumerate(pairs):
                assert np.isfinite(value)
                assert value * raw >= 0
                if position != last:
                    assert abs(value) <= abs(raw)
                    assert raw < 0 or value == raw


@EXAMPLES
@hypothesis.given(step=STEPS, config=CONFIGS)
def test_rebalanced_groups_have_the_target_ratio(build, step, config):
    config = dataclasses.replace(config, rebalance=True)
    for credit in compute_advantages(build_step(build, step), config).credits:
        before = answer_turn_sums(credit.group, credit.raw.tolist())
        after = answer_turn_sums(credit.group, credit.answer_advantages())
        if min(before) == 0:
            assert after == (0, 0)
        else:
            assert after[1] / after[0] == pytest.approx(config.target_ratio, rel=1e-9)
            unscaled_side = config.adjust == "positive"
            assert after[unscaled_side] == before[unscaled_side]


@EXAMPLES
@hypothesis.given(step=STEPS, config=CONFIGS, variant=VARIANTS, data=st.data())
def test_order_of_groups_and_members_is_irrelevant(build, step, config, variant, data):
    groups, config = build_step(build, step), dataclasses.replace(config, **variant)
    reference = {
        (group.question.id, trajectory.index): values
        for group, advantages in zip(groups, compute_advantages(groups, config).advantages, strict=True)
        for trajectory, values in zip(group.trajectories, advantages, strict=True)
    }
    shuffled = [
        dataclasses.replace(group, trajectories=data.draw(st.permutations(group.trajectories)))
        for group in data.draw(st.permutations(groups))
    ]
    result = compute_advantages(shuffled, config)
    assert all(np.isfinite(values).all() for values in reference.values())
    for group, advantages in zip(shuffled, result.advantages, strict=True):
        for trajectory, values in zip(group.trajectories, advantages, strict=True):
            np.testing.assert_array_equal(values, reference[group.question.id, trajectory.index])


@EXAMPLES
@hypothesis.given(step=STEPS, config=CONFIGS)
def test_uncalibrated_calibadv_equals_its_base(build, step, config):
    groups = build_step(build, step)
    uncalibrated = dataclasses.replace(config, soft_penalty=False, rebalance=False)
    advantages = compute_advantages(groups, uncalibrated).advantages
    expected = compute_advantages(groups, dataclasses.replace(config, name=config.base)).advantages
    for group, base_group in zip(advantages, expected, strict=True):
        for values, base_values in zip(group, base_group, strict=True):
            np.testing.assert_array_equal(values, base_values)


@EXAMPLES
@hypothesis.given(step=STEPS, config=CONFIGS)
def test_soft_penalty_and_rebalance_change_different_turns(build, step, config):
    """So neither needs to know whether the other has run before it."""
    groups = build_step(build, step)

    def credits(soft_penalty, rebalance):
        switched = dataclasses.replace(config, soft_penalty=soft_penalty, rebalance=rebalance)
        return compute_advantages(groups, switched).credits

    steps = zip(credits(True, True), credits(True, False), credits(False, True), strict=True)
    for both, softened, rebalanced in steps:
        for index, trajectory in enumerate(both.group.trajectories):
            last = last_sampled_turn(trajectory)
            expected = softened.turns[index].copy()
            if last is not None:
                expected[last] = rebalanced.turns[index][last]
            np.testing.assert_array_equal(both.turns[index], expected)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(step=STEPS, config=CONFIGS, variant=VARIANTS)
def test_rebalance_of_all_turns_has_the_target_ratio(build, step, config, variant):
    """Of a group or of the step. With `rebalance_excess`, a ratio that is not above the target may stay."""
    variant |= {"name": "calibadv", "rebalance_over": "all", "rebalance_by": "advantage"}
    hypothesis.assume(variant["adjust"] != "clip")
    config = dataclasses.replace(config, rebalance=True, **variant)
    credits = compute_advantages(build_step(build, step), config).credits
    balanced_sets = [credits] if config.rebalance_within == "step" else [[credit] for credit in credits]
    for balanced in balanced_sets:
        masses = []
        for credit in balanced:
            for trajectory, turns in zip(credit.group.trajectories, credit.turns, strict=True):
                for turn, value in zip(trajectory.turns, turns, strict=True):
                    masses.append(value * len(turn.token_ids))
        positive, negative = positive_negative_sums(masses)
        limit = config.target_ratio * positive * (1 + 1e-9)
        if (positive, negative) == (0, 0) or (config.rebalance_excess and negative <= limit):
            continue
        assert negative / positive == pytest.approx(config.target_ratio)
