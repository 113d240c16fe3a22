"""Credit against the truth, worked out by hand on a few groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.contrib.audit.evidence import gather, join
from calibadv_jax.contrib.audit.measures import MEASURES, measure

CENTRED = AdvantageConfig(normalize_std=False)  # advantages are thirds


def about(group, *supporting):
    """The group, of a question with these supporting passages."""
    group.question = replace(group.question, supporting_ids=supporting)
    for trajectory in group.trajectories:
        trajectory.question = group.question
    return group


@pytest.fixture
def first(build):
    """Scores 1, 0, 0: raw advantages 2/3, -1/3, -1/3. Silver: p1, x1, p2, x2, x3. Nobody sees p4."""
    turn = build.turn
    right = [
        turn(think="look for it", documents=["p1", "x1"]),
        turn(think="look for it", documents=["p2", "x2", "x3"]),  # repeats a think: correctness 0
        turn("answer", num_tokens=3),
    ]
    wrong = [
        turn(think="one", documents=["x1", "x4"], num_tokens=4),  # half of it silver, none supporting
        turn(think="two", documents=["p1", "x5", "x6", "x7"], num_tokens=2),  # a quarter
        turn("invalid", think="no action", num_tokens=9),  # no search
        turn(think="three", documents=["p1"], num_tokens=3),  # seen before
        turn("answer", num_tokens=2),
    ]
    invalid = [turn(think="four", documents=["p2", "p3"], num_tokens=6), turn("answer")]
    group = build.group((1.0, True, right), (0.0, True, wrong), (0.0, False, invalid))
    return about(group, "p1", "p2", "p3", "p4")


@pytest.fixture
def second(build):
    """No silver; the second search is the last sampled turn, and the second trajectory failed."""
    searches = [build.turn(think="five", documents=["q1"]), build.turn(think="six", documents=["q2"])]
    members = (0.0, True, searches), (0.0, True, searches)
    return about(build.group(*members, question_id="r", failed=[1]), "q1", "q2")


def measured(*groups, config=CENTRED):
    return measure(gather(compute_advantages(groups, config).credits))


def test_search_is_truly_good_if_it_shows_a_new_supporting_passage(build):
    shown = [["x"], ["p1", "x"], ["p1"], [], ["p1", "p2"], ["p2", "p1"]]
    turns = [build.turn(documents=ids) for ids in shown]
    group = about(build.group((1.0, True, [*turns, build.turn("answer")])), "p1", "p2", "p3")
    evidence = gather(compute_advantages([group], CENTRED).credits)
    assert evidence.searches["good"].tolist() == [False, True, False, False, True, False]


def test_search_that_ends_its_trajectory_is_not_counted(build):
    """The rebalance takes all of its advantage, which would look like the soft penalty."""
    lost = [build.turn(think="a", documents=["x"]), build.turn(think="b", documents=["p1"])]
    won = [build.turn(think="c", documents=["p1"]), build.turn("answer")]
    group = about(build.group((0.0, True, lost), (1.0, True, won)), "p1")
    evidence = gather(compute_advantages([group], CENTRED).credits)
    np.testing.assert_array_equal(evidence.searches["good"], [False, True])
    assert measure(evidence)["blame/good_blamed"] == 0


def test_by_hand(first, second):
    measures = measured(first, second)
    assert {name: measures[name] for name in measures if name not in MEASURES} == {
        "groups": 2,
        "trajectories": 4,  # without the one that failed
        "searches": 7,  # 2 + 3 + 1, and the first one of the second group
        "blamed": 4,
    }
    assert {name: measures[name] for name in MEASURES} == pytest.approx(
        {
            "silver/group_share": 1 / 2,
            "silver/size": 5,
            "silver/precision": 2 / 5,
            "silver/recall": 2 / 4,
            "silver/seen_precision": 3 / 10,  # p1, p2, p3 of these and x1 … x7
            "silver/seen_recall": 3 / 4,
            "search/good_share": 5 / 7,
            "search/judged_share": 5 / 7,
            "search/judged_good_share": 3 / 5,
            # Judged: good ones have correctness 1, 0 and 1/4, useless ones 1/2 and 0.
            "search/precision": 2 / 3,
            "search/recall": 2 / 3,
            "search/agreement": 3 / 5,
            "search/auc": (1 + 1 + 0 + 0.5 + 0 + 1) / 6,
            # Blamed are four, in thirds × tokens: good 2 and 6, useless 4 and 3.
            "blame/good_blamed": 2 / 5,
            "blame/good_share": 2 / 4,
            "blame/good_spared": (2 / 4) / (2 + 6),
            "blame/useless_spared": (4 / 2) / (4 + 3),
            "blame/spared_good_share": 0.5 / (0.5 + 2),
        },
        rel=1e-12,
    )


def test_questions_without_supporting_passages_are_left_out(first, second, build):
    unknown = build.group(build.member(1.0, "x"), question_id="u")
    assert measured(unknown, first, second) == measured(first, second)
    assert measured(unknown) == {"groups": 0, "trajectories": 0, "searches": 0, "blamed": 0}


def test_steps_are_pooled(first, second):
    """A share over two steps is over all of their searches, not the mean of two shares."""
    parts = [gather(compute_advantages([group], CENTRED).credits) for group in (first, second)]
    assert measure(join(parts)) == measured(first, second)
    assert measure(parts[0])["search/good_share"] == 4 / 6 and measure(parts[1])["search/good_share"] == 1


def test_largest_weight_as_correctness_spares_more(first):
    measures = measured(first, config=replace(CENTRED, correctness="max"))
    assert measures["blame/good_spared"] == pytest.approx(2 / (2 + 6))
    assert measures["blame/useless_spared"] == pytest.approx(4 / (4 + 3))


def test_without_soft_penalty_searches_are_judged_and_not_spared(first):
    measures = measured(first, config=replace(CENTRED, soft_penalty=False))
    assert measures["search/precision"] == pytest.approx(2 / 3)
    assert measures["blame/good_spared"] == measures["blame/useless_spared"] == 0
    assert "blame/spared_good_share" not in measures  # nothing is taken away


def test_grpo_judges_and_spares_nothing(first):
    measures = measured(first, config=replace(CENTRED, name="grpo"))
    assert measures["silver/group_share"] == measures["search/judged_share"] == 0
    assert measures["blame/good_spared"] == 0
    assert measures["blame/good_blamed"] == 2 / 4
    assert set(MEASURES) - measures.keys() == {
        "silver/size",
        "silver/precision",
        "silver/recall",
        "silver/seen_precision",
        "silver/seen_recall",
        "search/judged_good_share",
        "search/precision",
        "search/recall",
        "search/agreement",
        "search/auc",
        "blame/spared_good_share",
    }


def test_best_possible_credit(build):
    """Good searches alone are called good, and are spared whole."""
    winner = [build.turn(think="a", documents=["p1"]), build.turn("answer")]
    loser = [
        build.turn(think="b", documents=["x1"]),
        build.turn(think="c", documents=["p1"], num_tokens=5),
        build.turn("answer"),
    ]
    measures = measured(about(build.group((1.0, True, winner), (0.0, True, loser)), "p1"))
    names = ["silver/precision", "silver/recall", "search/precision", "search/recall", "search/agreement"]
    names += ["search/auc", "blame/good_spared", "blame/spared_good_share"]
    assert {name: measures[name] for name in names} == dict.fromkeys(names, 1.0)
    assert measures["blame/useless_spared"] == 0
    assert measures["blame/good_blamed"] == 1 / 2  # by GRPO, although nothing is left of it
