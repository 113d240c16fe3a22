"""The reasons that the page gives: each says what was done, with the record's own numbers."""

import dataclasses

import numpy as np
import pytest

from benchmarks.generated_run import write_run
from calibadv_jax.advantages.estimators import ESTIMATORS
from calibadv_jax.config import AdvantageConfig, Config
from calibadv_jax.contrib.pages.site import RunFiles
from calibadv_jax.contrib.pages.transcript import group_words, plain, signed, trajectory_words, turn_words


@pytest.fixture
def explain(tmp_path, tokenizer, small_group):
    """Rows of the group under some advantage settings; words of its turns, trajectories, and of the group."""

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
            [turn_words(row, kept) for row in rows],
            [trajectory_words(row, rows, kept, "FLAW") for row in rows],
            " ".join(group_words(rows, kept)),
        )

    return explain


def test_softened_search_is_explained_with_its_numbers(explain):
    rows, words, whole, shared = explain()
    turn = rows[1]["turns"][0]
    assert turn["softened"] and turn["advantage"] == pytest.approx(turn["advantage_raw"] / 3)
    assert words[1][0] == (
        "Softened. Correctness 0.667: it found 2 new silver documents among its 3: “title a” (weight 1),"
        " “title b” (weight 1) (fraction: 2 / 3 = 0.667). −0.500 × (1 − 0.667) = −0.167."
    )
    assert whole[1] == "(0 − 0.25) / 0.5 = −0.500."
    assert shared.startswith(
        "Scores of the finished trajectories: 1, 0, 0, 0. Advantage by grpo: (score − mean 0.25) / standard"
        " deviation 0.5. Soft penalty: a negative advantage of an action is multiplied by 1 − its"
        " correctness."
    )


def test_turns_that_are_not_softened_say_why(explain):
    _, words, whole, _ = explain()
    assert words[0][0].startswith("Correctness 1: it found 3 new silver documents")
    assert words[1][1] == "Not softened. Correctness 0: the search repeats the documents of turn 1."
    assert words[2][0] == "Not softened. Correctness 0: it found no silver document."
    assert words[3] == ["", ""] and words[4] == [""]
    assert whole[3] == "Invalid format: FLAW. None of its turns is judged. (0 − 0.25) / 0.5 = −0.500."
    assert "left out of its group" in whole[4]


def test_explanation_of_a_group_stands_once(explain):
    """What holds for the whole group is in none of the columns."""
    _, words, whole, shared = explain()
    in_columns = " ".join([*whole, *(text for turns in words for text in turns)])
    for sentence in ("Scores of", "standard deviation", "Soft penalty", "Rebalancing", "sum up to"):
        assert shared.count(sentence) == 1 and sentence not in in_columns, sentence
    long = [text for text in [*whole, *sum(words, [])] if len(text) > 80]
    assert len(set(long)) == len(long)


def test_group_without_a_finished_trajectory_says_so(explain):
    def all_fail(group):
        group.failed += group.trajectories
        for trajectory in group.failed:
            trajectory.error = "retriever: gone"
        group.trajectories.clear()

    *_, shared = explain(all_fail)
    assert shared == "No trajectory of this group was finished: nothing is trained."


def test_repetition_that_found_something_new_names_it(explain):
    def change(group):
        search = group.trajectories[1].turns[1]
        search.documents = tuple(group.trajectories[0].turns[0].documents)

    _, words, *_ = explain(change)
    assert (
        "repeats the documents of turn 1, although it found 1 new silver document among its 3: “title c”"
        in (words[1][1])
    )


def test_documents_that_were_seen_before_are_no_find(explain):
    def change(group):
        search = group.trajectories[1].turns[1]
        search.documents = search.documents[:1]  # one shared document is no repetition

    _, words, *_ = explain(change)
    assert "Correctness 0: its silver documents had been seen before." in words[1][1]


def test_each_correctness_is_explained_by_its_own_formula(explain):
    formulas = ("(max: the largest of these weights = 1)", "(mean: 2 (sum of these weights) / 3 = 0.667)")
    for how, formula in zip(("max", "mean"), formulas, strict=True):
        _, words, *_ = explain(correctness=how)
        assert formula in words[1][0]


def test_group_without_silver_documents_says_so_once(explain):
    def nobody_is_right(group):
        group.trajectories[0].turns[-1].answer = "bob"

    _, words, whole, shared = explain(nobody_is_right)
    assert words[1] == ["", "", ""] and whole[1] == ""
    assert "the group has no silver documents (no trajectory in the right format" in shared
    assert "scored 0.7 of the largest reward or more" in shared
    assert "do not differ, so every advantage is 0.000" in shared and "Rebalancing" not in shared


def test_answer_turn_shows_the_rebalancing(explain):
    rows, words, _, shared = explain()
    before = [row["turns"][-1]["advantage_raw"] * len(row["turns"][-1]["token_ids"]) for row in rows[:4]]
    positive, negative = before[0], -sum(before[1:])
    assert f"sum up to {plain(positive)}, the negative ones to −{plain(negative)}." in shared
    assert shared.endswith("The positive side is rescaled until negative / positive = λ = 1.")
    factor, after = negative / positive, rows[0]["turns"][-1]["advantage"]
    assert after == pytest.approx(1.5 * factor, rel=1e-5)
    assert words[0][-1] == f"Answer turn, rescaled: +1.500 × {plain(factor)} = {signed(after)}."
    assert words[1][-1] == ""


def test_negative_side_and_another_ratio(explain):
    rows, words, _, shared = explain(adjust="negative", target_ratio=2.0)
    assert shared.endswith("The negative side is rescaled until negative / positive = λ = 2.")
    assert words[0][-1] == ""
    assert words[1][-1].endswith(f" = {signed(rows[1]['turns'][-1]['advantage'])}.")


def test_answer_that_nothing_balances_becomes_zero(explain):
    def only_losers_sampled(group):
        empty = group.trajectories[0]
        for turn in empty.turns:
            turn.token_ids, turn.logprobs = turn.token_ids[:0], turn.logprobs[:0]

    rows, words, _, shared = explain(only_losers_sampled)
    assert rows[1]["turns"][-1]["advantage"] == 0
    assert shared.endswith("One side is empty and nothing can balance the other: they become 0.")
    assert words[0] == ["No token was sampled: nothing is trained."] * 2


def test_switches_that_are_off_are_named(explain):
    _, words, whole, shared = explain(soft_penalty=False, rebalance=False, normalize_std=False)
    assert words[1][0].startswith("Correctness 0.667") and words[1][-1] == ""
    assert shared.endswith("Switched off: advantage.soft_penalty. Switched off: advantage.rebalance.")
    assert whole[1] == "0 − 0.25 = −0.250."


def test_another_estimator_is_named_with_its_formula(explain):
    carried = " calibrates no turn: every turn carries its trajectory's advantage."
    _, words, whole, shared = explain(name="rloo")
    formula = "Advantage by rloo: score - mean of the others. rloo"
    assert shared == f"Scores of the finished trajectories: 1, 0, 0, 0. {formula}{carried}"
    assert whole[:3] == [""] * 3 and words[1] == [""] * 3
    _, words, _, shared = explain(name="grpo")
    assert words[1] == [""] * 3 and shared.endswith(" grpo" + carried)
    *_, whole, shared = explain(name="dr_grpo")
    assert whole[0] == "1 − 0.25 = +0.750." and "dr_grpo: score − mean 0.25." in shared
    _, words, _, shared = explain(base="rloo")
    assert "rloo: score - mean of the others." in shared and words[1][0].startswith("Softened.")


@pytest.mark.parametrize("name", ["gae", "igpo", "gigpo", "querygroup", "tips"])
def test_estimator_by_turn_never_calibrates_no_turn(explain, name):
    """PPO and its like: "calibrates no turn" and "an advantage of its own" contradict each other."""

    def values(group):
        for trajectory in [*group.trajectories, *group.failed]:
            for turn in trajectory.turns:
                turn.values = np.linspace(0.1, 0.6, len(turn.token_ids), dtype=np.float32)
                turn.golden_logprobs = {"current": -1.0 - len(turn.token_ids), "initial": -2.0}

    _, words, whole, shared = explain(values, name=name)
    assert f"{name}: {ESTIMATORS[name].carried}. The number of a trajectory is that of its last" in shared
    assert "calibrates no turn" not in " ".join([shared, *whole, *sum(words, [])])


def test_turns_with_advantages_of_their_own(explain):
    rows, words, _, shared = explain(name="querygroup")
    search, last = rows[0]["turns"][0], rows[0]["turns"][-1]
    assert search["advantage_raw"] == search["advantage"] != rows[0]["advantage_raw"] == last["advantage"]
    assert "querygroup: searches are compared with each other" in shared
    assert words[1][0].startswith("Correctness 0.667: it found 2 new silver documents")


def test_variant_of_the_calibration_is_named(explain):
    _, words, _, shared = explain(rebalance_over="all", softening="aggressive")
    assert words[1][0].startswith("Correctness 0.667: ") and words[0][-1] == ""
    assert "CalibAdv with softening=aggressive, rebalance_over=all: each turn shows" in shared


def test_numbers_have_a_real_minus():
    assert [signed(value) for value in (-1.1547, 0.5, 0.0, -0.0001)] == ["−1.155", "+0.500", "0.000", "0.000"]
    assert [plain(value) for value in (-0.5, 2.0, 1 / 3)] == ["−0.5", "2", "0.333"]
