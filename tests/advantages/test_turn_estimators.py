"""Estimators that give turns credit of their own, by hand on small groups."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from calibadv_jax.advantages.baselines import whiten
from calibadv_jax.advantages.estimators import compute_advantages, describe
from calibadv_jax.advantages.gae import gae_advantages, gae_and_returns
from calibadv_jax.advantages.turn_rewards import discounted_returns, normalize_by_label
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Document

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

PLAIN = AdvantageConfig(name="gae")
HALF = 1 / math.sqrt(2)  # of two values x > y: (x - mean) / std


def turns_of(name, group, **settings):
    """Advantages of the turns of each trajectory; centred only, unless settings say otherwise."""
    config = AdvantageConfig(**{"name": name, "normalize_std": False} | settings)
    (credit,) = compute_advantages([group], config).credits
    return [turns.tolist() for turns in credit.turns]


def close(actual, expected):
    assert [len(turns) for turns in actual] == [len(turns) for turns in expected]
    for turns, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(turns, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def searching(build):
    """A group of (score, [document ids of each search]); then comes an answer turn."""

    def searching(*members, golden=None, **question):
        group = build.group(*(build.member(score, *searches) for score, searches in members))
        group.question = replace(group.question, **question)
        for trajectory, values in zip(group.trajectories, golden or [], strict=bool(golden)):
            for turn, value in zip(trajectory.turns, values, strict=True):
                turn.golden_logprobs = {"current": math.log(value), "initial": value}
        return group

    return searching


def test_gigpo_compares_turns_after_equal_observations(searching):
    group = searching((1.0, ["x"]), (0.0, ["x"]), (0.0, ["y"]))
    for trajectory, shown in zip(group.trajectories, (1, 1, 2), strict=True):
        trajectory.turns[0].observation_ids = np.array([shown], np.int32)
    # Returns 1/2 and 0 after the prompt, 1 and 0 after the first observation; the other one is alone.
    whole = [2 / 3, -1 / 3, -1 / 3]
    expected = [[whole[0] + 1 / 3, whole[0] + 1 / 2], [whole[1] - 1 / 6, whole[1] - 1 / 2]]
    expected.append([whole[2] - 1 / 6, whole[2]])
    close(turns_of("gigpo", group, discount=0.5), expected)
    spread = turns_of("gigpo", group, discount=0.5, normalize_std=True, turn_weight=2)
    a, b, c = 2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)  # GRPO's
    close(spread, [[3 * a, a + 2 * HALF], [3 * b, b - 2 * HALF], [3 * c, c]])
    # An empty observation is no prompt: the second turn of the first trajectory has no first turns as peers.
    close(turns_of("gigpo", searching((1.0, [[]]), (0.0, []))), [[1.0, 0.5], [-1.0]])


def test_mt_grpo_rewards_turns_with_golden_answers(searching):
    group = searching((1.0, ["a", "b"]), (0.0, ["c", "d"]), (0.5, ["e"]))
    first = group.trajectories[0].turns[0]
    first.documents = (Document("a", "The Gold!", "of it"), Document("z", "", ""))
    group.trajectories[1].turns[0].documents = (Document("c", "marigolds", "golden"),)  # other words
    close(turns_of("mt_grpo", group), [[0.5 + 2 / 3, 0.5, 0.5], [-0.5 - 1 / 3] + [-0.5] * 2, [-1 / 3, 0.0]])


def compared(winner, loser):
    """Turns of two trajectories of scores 1 and 0, whose turns have these rewards; the last turn has none."""
    halves = [(own - other) / 2 for own, other in zip(winner, loser, strict=True)]
    return [[0.5 + value for value in (*halves, 0)], [-0.5 - value for value in (*halves, 0)]]


@pytest.mark.parametrize(
    ("winner", "loser", "targets", "rewards"),
    [
        # Gains less redundancy: 1/2, then 1/2 - 1/2; 0, then -1.
        (["sx", "tx"], ["xy", "xy"], "st", ([0.5, 0.0], [-1.0, -1.0])),
        # If the question names none, the winner's documents are the targets: s, x, t.
        (["sx", "tx"], ["xy", "xy"], "", ([2 / 3 + 1 / 3 - 1 / 2, 1 / 3 - 1 / 2], [1 / 3 - 1, -1.0])),
        # Of four documents two were among the three of the first search: 1/4 new less 2/4.
        (["axy", "xyzb"], ["w", "v"], "abcd", ([1 / 4 - 1 / 4, 1 / 4 - 2 / 4], [0.0, 0.0])),
    ],
)
def test_stepsearch_rewards_new_target_documents(searching, winner, loser, targets, rewards):
    group = searching((1.0, winner), (0.0, loser), supporting_ids=tuple(targets))
    close(turns_of("stepsearch", group), compared(*rewards))


def test_igpo_standardises_gains_and_scores_together(searching):
    group = searching((1.0, [[], []]), (0.0, [[]]), golden=[[0.25, 0.75, 0.5], [0.25, 0.5]])
    rewards = np.array([0.5, -0.25, 1.0, 0.25, 0.0])
    spread = (rewards - rewards.mean()) / rewards.std(ddof=1)
    for discount in (1.0, 0.5):
        expected = [discounted_returns(spread[:3], discount), discounted_returns(spread[3:], discount)]
        close(turns_of("igpo", group, discount=discount, normalize_std=True), expected)


def test_a2tgpo_compares_gains_of_one_number(searching):
    group = searching((1.0, [[], []]), (0.0, [[], []]), golden=[[0.25, 0.75, 0.5], [0.25, 0.5, 0.75]])
    first, second = (0.5 - 0.25) / 2, (-0.25 - 0.25) / 2
    part = [(first + second) / math.sqrt(2), second, 0.0]
    close(turns_of("a2tgpo", group), [[0.5 + value for value in part], [-0.5 - value for value in part]])


def test_tips_sums_the_initial_policys_gains(searching):
    group = searching((1.0, [[], []]), (0.0, [[], []]), golden=[[0.1, 0.2, 0.9], [0.1, 0.4, 0.3]])
    rewards = [0.1 + 0.5 * 0.7, 0.7], [0.3 - 0.5 * 0.1, -0.1]
    close(turns_of("tips", group, discount=0.5), compared(*rewards))


@pytest.mark.parametrize("name", ["gigpo", "mt_grpo", "stepsearch", "igpo", "a2tgpo", "tips"])
def test_equal_trajectories_get_exactly_nothing(searching, name):
    golden, score = ([0.3, 0.3, 0.3], 0.0) if name == "igpo" else ([0.3, 0.7, 0.7], 2 / 3)
    group = searching(*[(score, [["a", "b"], ["a"]])] * 3, golden=[golden] * 3)
    assert turns_of(name, group, normalize_std=True) == [[0.0] * 3] * 3


@pytest.mark.parametrize(
    ("name", "policy"), [("igpo", "current"), ("a2tgpo", "current"), ("tips", "initial")]
)
def test_missing_golden_logprobs_are_refused(searching, name, policy):
    group = searching((1.0, [["a"]]), (0.0, []))
    group.trajectories[0].turns[1].golden_logprobs.pop(policy)
    with pytest.raises(UserError, match=rf"^question 'q': .* advantage.probes='\[{policy}\]'"):
        turns_of(name, group)
    assert turns_of("mt_grpo", group)
    group.trajectories[0].turns[0].values = None
    with pytest.raises(UserError, match="no values of a critic were kept, which gae needs"):
        compute_advantages([group], PLAIN)


@pytest.mark.parametrize("name", ["gigpo", "mt_grpo", "stepsearch", "a2tgpo", "tips"])
def test_turn_weight_of_zero_is_grpo(searching, name):
    golden = [[0.1, 0.3, 0.2], [0.1, 0.4], [1]]
    group = searching((1.0, [["a"], []]), (0.2, [["b"]]), (0.0, []), golden=golden)
    close(turns_of(name, group, turn_weight=0), turns_of("grpo", group))


def test_discounted_returns_by_hand():
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]
    assert discounted_returns(np.zeros(0), 0.5).tolist() == []


def test_values_are_compared_with_those_of_their_label():
    values = [np.array([1.0, 5.0]), np.array([3.0])]
    normalized = normalize_by_label(values, ["ab", "a"], AdvantageConfig(normalize_std=False))
    assert [turns.tolist() for turns in normalized] == [[-1, 0], [1]]


@pytest.mark.parametrize(
    ("name", "policy"), [("igpo", "current"), ("a2tgpo", "current"), ("tips", "initial")]
)
def test_refusal_without_golden_logprobs_is_one_line(searching, name, policy):
    group = searching((1.0, [["a"]]), (0.0, []))
    group.trajectories[0].turns[1].golden_logprobs.pop(policy)
    with pytest.raises(UserError) as error:
        turns_of(name, group)
    assert str(error.value) == (
        f"question 'q': the golden answer's log-probabilities under the {policy} policy were not kept:"
        f" train with advantage.probes='[{policy}]', or change advantage.name"
    )


def test_refusal_without_critic_values_is_one_line(build):
    group = build.group((1.0, True, [replace(build.turn(), values=None)]))
    with pytest.raises(UserError, match="no values of a critic were kept, which gae needs") as error:
        compute_advantages([group], PLAIN)
    assert "\n" not in str(error.value)


def test_probes_follow_the_estimator():
    assert AdvantageConfig().probed == ()
    assert AdvantageConfig(name="igpo").probed == AdvantageConfig(base="a2tgpo").probed == ("current",)
    assert AdvantageConfig(name="tips", probes=["current"]).probed == ("current", "initial")
    assert AdvantageConfig(name="grpo", base="igpo").probed == ()
    assert "under the initial policy" in describe(AdvantageConfig(name="tips"))[-1]
    assert not any("golden answers:" in line for line in describe(AdvantageConfig(name="mt_grpo")))


def test_published_values(shared):
    """verl's, which carries value and advantage over the tokens that nobody sampled."""
    cases = json.loads((shared / "golden" / "estimators.json").read_text(encoding="utf-8"))
    chosen = [case for case in cases if case.get("estimator") == "gae_masked"]
    assert len(chosen) == 6
    for case in chosen:
        columns = [*(case["inputs"][name] for name in ("mask", "rewards", "values"))]
        columns += [case["expected"][name] for name in ("returns", "advantages")]
        rows = [
            [np.array(column)[np.array(mask, bool)] for column in row]
            for mask, *row in zip(*columns, strict=True)
        ]
        factors = case["settings"]["gamma"], case["settings"]["lam"]
        ours = [gae_advantages(rewards, values, *factors) for rewards, values, *_ in rows]
        for own, white, (_, values, returns, expected) in zip(ours, whitened(*ours), rows, strict=True):
            np.testing.assert_allclose(own + values, returns, rtol=1e-6, atol=1e-7, err_msg=case["name"])
            np.testing.assert_allclose(white, expected, rtol=1e-6, atol=1e-7, err_msg=case["name"])


def whitened(*tokens):
    return whiten(tokens, [np.ones(len(values), int) for values in tokens])


def turn(build, kind, values, **more):
    return replace(build.turn(kind, num_tokens=len(values), **more), values=np.array(values, np.float32))


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


def test_calibration_moves_tokens_of_a_turn_alike(build):
    """A search of silver documents in a losing trajectory: its mean becomes 0, its tokens stay apart."""
    right = [turn(build, "search", [0.0, 0.0], documents="a"), turn(build, "answer", [0.0])]
    wrong = [turn(build, "search", [0.5, 1.0], documents="a"), turn(build, "answer", [0.5])]
    group = build.group((1.0, True, right), (0.0, True, wrong))
    plain = compute_advantages([group], PLAIN)
    eased = compute_advantages([group], replace(PLAIN, name="calibadv", base="gae"))
    before, after = plain.advantages[0][1], eased.advantages[0][1]
    assert before[:2].mean() < 0
    assert after[:2].mean() == pytest.approx(0, abs=1e-6)
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    assert eased.credits[0].softened[1].tolist() == [True, False]


def test_groups_of_a_step_are_whitened_together(build):
    first, other = (build.group((score, True, [turn(build, "answer", [0.0])])) for score in (1.0, 0.0))
    advantages = compute_advantages([first, other], PLAIN).advantages
    assert advantages[0][0][0] == -advantages[1][0][0] == pytest.approx(2**-0.5)


def test_lambda_1_gives_the_score_less_the_value(build):
    group = build.group((0.7, True, [turn(build, "answer", [0.25, 0.5, 2.0])]))
    advantages, returns = gae_and_returns(group.trajectories[0], PLAIN)
    np.testing.assert_allclose(advantages, 0.7 - np.array([0.25, 0.5, 2.0]))
    np.testing.assert_allclose(returns, 0.7)


VALUES = st.lists(st.floats(-2, 2, width=32), max_size=4)
TURNS = st.lists(st.tuples(VALUES, st.integers(0, 3)), max_size=4)
TRAJECTORIES = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), TURNS), min_size=1, max_size=5)


@hypothesis.given(TRAJECTORIES, st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.9, 1.0]), st.randoms())
@hypothesis.settings(max_examples=40)
def test_gae_ignores_observations_order_and_turn_boundaries(build, members, discount, decay, random):
    config = replace(PLAIN, discount=discount, gae_lambda=decay)

    def sampled_advantages(members):
        made = []
        for score, turns in members:
            made.append((score, True, [turn(build, "search", values, num_observed=n) for values, n in turns]))
        group = build.group(*made)
        (advantages,) = compute_advantages([group], config).advantages
        for trajectory, values in zip(group.trajectories, advantages, strict=True):
            assert not values[~trajectory.mask].any()
        pairs = zip(group.trajectories, advantages, strict=True)
        return [values[trajectory.mask] for trajectory, values in pairs]

    expected = sampled_advantages(members)
    unobserved = [(score, [(values, 0) for values, _ in turns]) for score, turns in members]
    np.testing.assert_equal(sampled_advantages(unobserved), expected)
    order = random.sample(range(len(members)), len(members))
    reordered = sampled_advantages([members[index] for index in order])
    np.testing.assert_equal(reordered, [expected[index] for index in order])
    joined = [(score, [(sum((values for values, _ in turns), []), 0)]) for score, turns in members]
    for values, other in zip(sampled_advantages(joined), expected, strict=True):
        np.testing.assert_allclose(values, other, rtol=1e-5, atol=1e-6)
    tokens = np.concatenate(expected)
    if len(tokens) > 1 and np.ptp(tokens):
        assert tokens.mean() == pytest.approx(0, abs=1e-5)
