"""GAE over sampled tokens: against verl's values, by hand, and what holds for all trajectories."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages, gae_and_returns, token_advantages, whiten
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

PLAIN = AdvantageConfig(name="gae")


def test_published_values(shared):
    """verl's, which carries value and advantage over the tokens that nobody sampled."""
    cases = json.loads((shared / "golden" / "estimators.json").read_text(encoding="utf-8"))
    chosen = [case for case in cases if case.get("estimator") == "gae_masked"]
    assert len(chosen) == 6
    for case in chosen:
        masks = [np.array(row, bool) for row in case["inputs"]["mask"]]

        def sampled(rows, masks=masks):
            return [np.array(row)[mask] for row, mask in zip(rows, masks, strict=True)]

        rewards, values = sampled(case["inputs"]["rewards"]), sampled(case["inputs"]["values"])
        settings = case["settings"]
        advantages = [
            token_advantages(*row, settings["gamma"], settings["lam"])
            for row in zip(rewards, values, strict=True)
        ]
        returns = [own + value for own, value in zip(advantages, values, strict=True)]
        for ours, key in ((returns, "returns"), (whitened(*advantages), "advantages")):
            for row, expected in zip(ours, sampled(case["expected"][key]), strict=True):
                np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-7, err_msg=case["name"])


def whitened(*tokens):
    return whiten(tokens, [np.ones(len(values), int) for values in tokens])


def turn(build, kind, values, num_observed=0):
    made = build.turn(kind=kind, num_tokens=len(values), num_observed=num_observed)
    return replace(made, values=np.array(values, np.float32))


def test_by_hand(build):
    """Score 1, gamma 1/2, lambda 1/2: the surprise of a token, and a quarter of what follows it."""
    turns = [turn(build, "search", [0.0, 0.5], num_observed=3), turn(build, "answer", [1.0, 0.0])]
    group = build.group((1.0, True, turns))
    config = replace(PLAIN, discount=0.5, gae_lambda=0.5)
    advantages, returns = gae_and_returns(group.trajectories[0], config)
    last = 1.0
    third = 0.5 * 0.0 - 1.0 + 0.25 * last
    second = 0.5 * 1.0 - 0.5 + 0.25 * third  # what follows the search is the answer, not the documents
    first = 0.5 * 0.5 - 0.0 + 0.25 * second
    assert advantages.tolist() == [first, second, third, last]
    assert returns.tolist() == [first, second + 0.5, third + 1.0, last]
    (tokens,) = compute_advantages([group], config).advantages[0]
    (white,) = whitened(np.array([first, second, third, last]))
    np.testing.assert_allclose(tokens, [*white[:2], 0, 0, 0, *white[2:]], rtol=1e-6)


def test_lambda_1_is_the_score_less_the_value(build):
    group = build.group((0.7, True, [turn(build, "answer", [0.25, 0.5, 2.0])]))
    advantages, returns = gae_and_returns(group.trajectories[0], PLAIN)
    np.testing.assert_allclose(advantages, 0.7 - np.array([0.25, 0.5, 2.0]))
    np.testing.assert_allclose(returns, 0.7)


def test_calibration_moves_tokens_of_a_turn_alike(build):
    """A search of silver documents in a losing trajectory: its mean becomes 0, its tokens stay apart."""
    right = [
        replace(build.turn(documents="a", num_tokens=2), values=np.zeros(2, np.float32)),
        turn(build, "answer", [0.0]),
    ]
    wrong = [
        replace(build.turn(documents="a", num_tokens=2), values=np.array([0.5, 1.0], np.float32)),
        turn(build, "answer", [0.5]),
    ]
    group = build.group((1.0, True, right), (0.0, True, wrong))
    plain = compute_advantages([group], PLAIN)
    eased = compute_advantages([group], replace(PLAIN, name="calibadv", base="gae"))
    before, after = plain.advantages[0][1], eased.advantages[0][1]
    assert before[:2].mean() < 0
    assert after[:2].mean() == pytest.approx(0, abs=1e-6)
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    assert eased.credits[0].softened[1].tolist() == [True, False]


def test_missing_critic_values_are_refused(build):
    group = build.group((1.0, True, [replace(build.turn(), values=None)]))
    with pytest.raises(
        UserError, match="no values of a critic were kept, and gae cannot do without"
    ) as error:
        compute_advantages([group], PLAIN)
    assert "\n" not in str(error.value)


VALUES = st.lists(st.floats(-2, 2, width=32), max_size=4)
TURNS = st.lists(st.tuples(VALUES, st.integers(0, 3)), max_size=4)
TRAJECTORIES = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), TURNS), min_size=1, max_size=5)


@hypothesis.given(TRAJECTORIES, st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.9, 1.0]), st.randoms())
@hypothesis.settings(max_examples=40)
def test_properties(build, members, discount, decay, random):
    """Neither observations nor order nor the cuts between turns change what a sampled token gets."""
    config = replace(PLAIN, discount=discount, gae_lambda=decay)

    def group_of(chosen, observed=lambda count: count):
        return build.group(
            *(
                (score, True, [turn(build, "search", values, observed(count)) for values, count in turns])
                for score, turns in chosen
            )
        )

    def sampled(group):
        advantages = compute_advantages([group], config).advantages[0]
        for trajectory, values in zip(group.trajectories, advantages, strict=True):
            assert not values[~trajectory.mask].any()
        return [
            values[trajectory.mask] for trajectory, values in zip(group.trajectories, advantages, strict=True)
        ]

    plain = sampled(group_of(members))
    np.testing.assert_equal(sampled(group_of(members, lambda count: 0)), plain)
    order = random.sample(range(len(members)), len(members))
    moved = sampled(group_of([members[index] for index in order]))
    np.testing.assert_equal(moved, [plain[index] for index in order])
    joined = [(score, [(sum((values for values, _ in turns), []), 0)]) for score, turns in members]
    for values, other in zip(sampled(group_of(joined)), plain, strict=True):
        np.testing.assert_allclose(values, other, rtol=1e-5, atol=1e-6)
    tokens = np.concatenate(plain)
    if len(tokens) > 1 and np.ptp(tokens):
        assert tokens.mean() == pytest.approx(0, abs=1e-5)


def test_groups_of_a_step_are_whitened_together(build):
    first, other = (build.group((score, True, [turn(build, "answer", [0.0])])) for score in (1.0, 0.0))
    advantages = compute_advantages([first, other], PLAIN).advantages
    assert advantages[0][0][0] == -advantages[1][0][0] == pytest.approx(2**-0.5)
    assert isinstance(first, Group)
