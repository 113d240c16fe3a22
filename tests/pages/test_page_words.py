"""The reasons that the page gives: each says what was done, with the record's own numbers."""

import dataclasses

import pytest

from benchmarks.generated_run import write_run
from calibadv_jax.config import AdvantageConfig, Config
from calibadv_jax.pages.run_files import RunFiles
from calibadv_jax.pages.words import plain, signed, trajectory_words, turn_words


@pytest.fixture
def explain(tmp_path, tokenizer, small_group):
    """Rows of the group under some advantage settings; words of each trajectory's turns, and of each."""

    def explain(change=lambda group: None, **settings):
        group = small_group()
        change(group)
        config = Config(advantage=AdvantageConfig(**settings))
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        write_run(folder, [[group]], config, tokenizer)
        rows = RunFiles(folder).group(1, 0)
        kept = dataclasses.asdict(config.advantage)
        return (
            rows,
            [turn_words(row, rows, kept) for row in rows],
            [trajectory_words(row, rows, kept) for row in rows],
        )

    return explain


def test_a_softened_search_is_explained_with_its_numbers(explain):
    rows, words, whole = explain()
    turn = rows[1]["turns"][0]
    assert turn["softened"] and turn["advantage"] == pytest.approx(turn["advantage_raw"] / 3)
    assert words[1][0] == (
        "Softened. Correctness 0.667: it found 2 new silver documents among its 3: “title a” (weight 1),"
        " “title b” (weight 1) (fraction: 2 / 3 = 0.667). The soft penalty leaves 1 − 0.667 = 0.333 of the"
        " penalty: −0.500 × 0.333 = −0.167."
    )
    assert whole[1] == (
        "Scores of the finished trajectories of the group: 1, 0, 0, 0. (Score 0 − mean 0.25) / standard"
        " deviation 0.5 = −0.500."
    )


def test_what_was_not_softened_says_why(explain):
    _, words, whole = explain()
    assert words[0][0].endswith(
        "Only a negative advantage is softened. It keeps the trajectory's advantage, +1.500."
    )
    assert words[1][1].startswith("Not softened. Correctness 0: the search repeats the documents of turn 1.")
    assert words[2][0].startswith("Not softened. Correctness 0: it found no silver document.")
    assert words[3][0].startswith("Not softened. Correctness 0: the trajectory's format is invalid")
    assert words[4] == ["The trajectory failed: no turn of it is trained."]
    assert "left out of its group" in whole[4]


def test_a_repetition_that_found_something_new_names_it(explain):
    def change(group):
        search = group.trajectories[1].turns[1]
        search.documents = tuple(group.trajectories[0].turns[0].documents)

    _, words, _ = explain(change)
    assert (
        "repeats the documents of turn 1, although it found 1 new silver document among its 3: “title c”"
        in (words[1][1])
    )


def test_documents_that_were_seen_before_are_no_find(explain):
    def change(group):
        search = group.trajectories[1].turns[1]
        search.documents = search.documents[:1]  # one shared document is no repetition

    _, words, _ = explain(change)
    assert "Correctness 0: its silver documents had been seen before." in words[1][1]


@pytest.mark.parametrize(
    ("how", "formula"),
    [
        ("max", "(max: the largest of these weights = 1)"),
        ("mean", "(mean: 2 (sum of these weights) / 3 = 0.667)"),
    ],
)
def test_each_correctness_is_explained_by_its_own_formula(explain, how, formula):
    _, words, _ = explain(correctness=how)
    assert formula in words[1][0]


def test_without_silver_documents_nothing_is_judged(explain):
    def nobody_is_right(group):
        group.trajectories[0].turns[-1].answer = "bob"

    _, words, whole = explain(nobody_is_right)
    assert "the group has no silver documents (no trajectory in the right format" in words[1][0]
    assert "scored 0.7 of the largest reward or more" in words[1][0]
    assert "do not differ, so the advantage is 0.000" in whole[1]


def test_the_answer_turn_shows_the_rebalancing(explain):
    rows, words, _ = explain()
    before = [row["turns"][-1]["advantage_raw"] * len(row["turns"][-1]["token_ids"]) for row in rows[:4]]
    positive, negative = before[0], -sum(before[1:])
    assert f"sum up to {plain(positive)}, the negative ones to −{plain(negative)}." in words[0][-1]
    factor, after = negative / positive, rows[0]["turns"][-1]["advantage"]
    assert after == pytest.approx(1.5 * factor, rel=1e-5)
    assert words[0][-1].endswith(
        f"until negative / positive = λ = 1: +1.500 × {plain(factor)} = {signed(after)}."
    )
    assert words[1][-1].endswith("Only the positive side is rescaled: this turn keeps −0.500.")


def test_the_other_side_and_another_ratio(explain):
    rows, words, _ = explain(adjust="negative", target_ratio=2.0)
    assert words[0][-1].endswith("Only the negative side is rescaled: this turn keeps +1.500.")
    assert "The negative side is rescaled until negative / positive = λ = 2:" in words[1][-1]
    assert words[1][-1].endswith(f" = {signed(rows[1]['turns'][-1]['advantage'])}.")


def test_an_answer_that_nothing_balances_becomes_zero(explain):
    def only_losers_sampled(group):
        empty = group.trajectories[0]
        for turn in empty.turns:
            turn.token_ids, turn.logprobs = turn.token_ids[:0], turn.logprobs[:0]

    rows, words, _ = explain(only_losers_sampled)
    assert rows[1]["turns"][-1]["advantage"] == 0
    assert words[1][-1].endswith("One side is empty and nothing can balance the other: they become 0.")
    assert words[0] == ["No token was sampled: nothing is trained."] * 2


def test_switches_that_are_off_are_named(explain):
    _, words, whole = explain(soft_penalty=False, rebalance=False, normalize_std=False)
    assert words[1][0].startswith("The soft penalty is off (advantage.soft_penalty). Correctness 0.667")
    assert "rebalancing is off (advantage.rebalance): it keeps −0.250." in words[1][-1]
    assert whole[1].endswith("Score 0 − mean 0.25 = −0.250.")


def test_grpo_calibrates_nothing(explain):
    _, words, _ = explain(name="grpo")
    assert words[1] == ["grpo calibrates no turn: it carries the trajectory's advantage, −0.500."] * 3


def test_another_estimator_is_named_with_its_formula(explain):
    rows, words, whole = explain(name="rloo")
    assert whole[0] == (
        "Scores of the finished trajectories of the group: 1, 0, 0, 0. rloo (score - mean of the others)"
        " gives it the advantage +1.000."
    )
    assert words[1][0] == "rloo calibrates no turn: it carries the trajectory's advantage, −0.333."
    _, words, whole = explain(name="dr_grpo")
    assert whole[0].endswith("Score 1 − mean 0.25 = +0.750.")
    _, words, whole = explain(base="rloo")
    assert "rloo (score - mean of the others)" in whole[1] and words[1][0].startswith("Softened.")


def test_turns_with_advantages_of_their_own(explain):
    rows, words, whole = explain(name="querygroup")
    search, last = rows[0]["turns"][0], rows[0]["turns"][-1]
    assert search["advantage_raw"] == search["advantage"] != rows[0]["advantage_raw"] == last["advantage"]
    assert "gives its answer turn the advantage +1.500" in whole[0]
    assert (
        words[0][0] == f"querygroup gives this turn an advantage of its own, {signed(search['advantage'])}."
    )
    _, words, _ = explain(base="querygroup", soft_penalty=False)
    assert "It keeps its own advantage" in words[0][0]


def test_a_variant_of_the_calibration_is_named(explain):
    rows, words, _ = explain(rebalance_over="all", softening="aggressive")
    assert words[1][0].startswith("Correctness 0.667: ")
    assert words[1][0].endswith(
        "CalibAdv with softening=aggressive, rebalance_over=all made 0.000 of −0.500."
    )
    assert words[0][-1].startswith("CalibAdv with softening=aggressive, rebalance_over=all made +")


def test_numbers_have_a_real_minus():
    assert [signed(value) for value in (-1.1547, 0.5, 0.0, -0.0001)] == ["−1.155", "+0.500", "0.000", "0.000"]
    assert [plain(value) for value in (-0.5, 2.0, 1 / 3)] == ["−0.5", "2", "0.333"]
