"""The reasons that the page gives: each says what was done, with the record's own numbers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.generated_run import write_run
from calibadv_jax.config import AdvantageConfig, Config
from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.contrib.pages.transcript import plain, signed
from calibadv_jax.core.registry import ESTIMATORS


@pytest.fixture
def explain(tmp_path, tokenizer, small_group):
    """Rows of the group under some advantage settings; words of its turns, trajectories, and of the group."""

    def explain(change=lambda group: None, **settings):
        group = small_group()
        change(group)
        config = Config(advantage=AdvantageConfig(**settings))
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        write_run(folder, [[group]], config, tokenizer)
        shown = json.loads(Site(folder).get("data/group_1_0.json"))
        return SimpleNamespace(
            rows=shown["trajectories"],
            is_judged=shown["is_judged"],
            turns=[[turn["why"] for turn in each["turns"]] for each in shown["trajectories"]],
            trajectories=[each["why"] for each in shown["trajectories"]],
            group=" ".join(shown["why"]),
        )

    return explain


def fail_all(group):
    group.failed += group.trajectories
    for trajectory in group.failed:
        trajectory.error = "retriever: gone"
    group.trajectories.clear()


def find_new(group):
    group.trajectories[1].turns[1].documents = tuple(group.trajectories[0].turns[0].documents)


def see_again(group):
    search = group.trajectories[1].turns[1]
    search.documents = search.documents[:1]  # one shared document is no repetition


def answer_wrong(group):
    group.trajectories[0].turns[-1].answer = "bob"


def empty_winner(group):
    for turn in group.trajectories[0].turns:
        turn.token_ids, turn.logprobs = turn.token_ids[:0], turn.logprobs[:0]


SCORES = "Scores of the finished trajectories: 1, 0, 0, 0. "
SOFT = "Soft penalty: a negative advantage of an action is multiplied by 1 − its correctness."
NO_SILVER = "(no trajectory in the right format that saw documents scored 0.7 of the largest reward or more)."
REPEATED = "repeats the documents of turn 1, although it found 1 new silver document among its 3: “title c”"
FINDING = "it found 2 new silver documents among its 3: “title a” (weight 1), “title b” (weight 1)"
GROUPS = {  # name: settings, and a change of the group
    "paper": ({}, None),
    "failed": ({}, fail_all),
    "new": ({}, find_new),
    "seen": ({}, see_again),
    "no silver": ({}, answer_wrong),
    "one side": ({}, empty_winner),
    "off": ({"soft_penalty": False, "rebalance": False, "normalize_std": False}, None),
    "variant": ({"rebalance_over": "all", "softening": "aggressive"}, None),
    "base": ({"base": "rloo"}, None),
    **{name: ({"correctness": name}, None) for name in ("max", "mean")},
    **{name: ({"name": name}, None) for name in ("rloo", "grpo", "dr_grpo", "querygroup")},
}
# Name; turn (trajectory, number), trajectory, or "" for the group; part of its words, after "=" all of them.
WORDS = [
    ("paper", (1, 0), f"Softened. Correctness 0.667: {FINDING} (fraction: 2 / 3 = 0.667)."),
    ("paper", (1, 0), " −0.500 × (1 − 0.667) = −0.167."),
    ("paper", 1, "=(0 − 0.25) / 0.5 = −0.500."),
    ("paper", "", f"{SCORES}Advantage by grpo: (score − mean 0.25) / standard deviation 0.5. {SOFT}"),
    ("paper", (0, 0), "Correctness 1: it found 3 new silver documents"),
    ("paper", (1, 1), "=Not softened. Correctness 0: the search repeats the documents of turn 1."),
    ("paper", (2, 0), "=Not softened. Correctness 0: it found no silver document."),
    *[("paper", place, "=") for place in ((3, 1), (4, 0))],
    ("paper", 3, "turn 2: no action: none of <search>, <answer>. None of its turns is judged."),
    ("paper", 4, "left out of its group"),
    ("failed", "", "=No trajectory of this group was finished: nothing is trained."),
    ("new", (1, 1), REPEATED),
    ("seen", (1, 1), "Correctness 0: its silver documents had been seen before."),
    ("max", (1, 0), "(max: the largest of these weights = 1)"),
    ("mean", (1, 0), "(mean: 2 (sum of these weights) / 3 = 0.667)"),
    ("no silver", "", "They do not differ, so every advantage is 0.000: nothing is learned from this group."),
    ("no silver", "", f"{SOFT} Every correctness is 0: the group has no silver documents {NO_SILVER}"),
    ("one side", (0, 0), "=No token was sampled: nothing is trained."),
    ("one side", "", "One side is empty and nothing can balance the other: they become 0."),
    *[(name, (1, 0), "=") for name in ("no silver", "rloo", "grpo")],
    *[(name, at, "=") for name, at in (("no silver", 1), ("off", (1, 2)), ("rloo", 0), ("variant", (0, 1)))],
    *[(name, (1, 0), "Correctness 0.667" + end) for name, end in (("off", ""), ("variant", ": "))],
    ("off", 1, "=0 − 0.25 = −0.250."),
    ("off", "", "Switched off: advantage.soft_penalty. Switched off: advantage.rebalance."),
    ("rloo", "", "score - mean of the others. rloo calibrates no turn: every turn carries"),
    ("grpo", "", " grpo calibrates no turn: every turn carries its trajectory's advantage."),
    ("dr_grpo", 0, "=1 − 0.25 = +0.750."),
    ("dr_grpo", "", "dr_grpo: score − mean 0.25."),
    ("base", (1, 0), "Softened."),
    ("base", "", "rloo: score - mean of the others."),
    ("querygroup", (1, 0), f"Correctness 0.667: {FINDING}"),
    ("querygroup", "", "querygroup: searches are compared with each other"),
    ("variant", "", "CalibAdv with softening=aggressive, rebalance_over=all: each turn shows"),
]


@pytest.mark.parametrize("name", GROUPS)
def test_words_of_turns_trajectories_and_group(explain, name):
    settings, change = GROUPS[name]
    words = explain(change or (lambda group: None), **settings)
    assert words.is_judged == (settings.get("name", "calibadv") in ("calibadv", "querygroup"))
    shown = {"": words.group} | dict(enumerate(words.trajectories))
    for index, turns in enumerate(words.turns):
        shown |= {(index, number): text for number, text in enumerate(turns)}
    for _, place, text in (row for row in WORDS if row[0] == name):
        assert shown[place] == text[1:] if text.startswith("=") else text in shown[place], place


def test_softened_search_shows_the_kept_numbers(explain):
    words = explain()
    turn = words.rows[1]["turns"][0]
    assert turn["softened"]
    assert turn["advantage"] == pytest.approx(turn["advantage_raw"] / 3)
    assert words.turns[1][0] == (
        f"Softened. Correctness 0.667: {FINDING} (fraction: 2 / 3 = 0.667). −0.500 × (1 − 0.667) = −0.167."
    )


def test_answers_that_nothing_balances_become_zero(explain):
    words = explain(empty_winner)
    assert words.rows[1]["turns"][-1]["advantage"] == 0
    assert words.turns[0] == ["No token was sampled: nothing is trained."] * 2


def test_turns_of_grpo_have_no_words_of_their_own(explain):
    assert explain(name="grpo").turns[1] == [""] * 3


def test_searches_of_querygroup_have_advantages_of_their_own(explain):
    words = explain(name="querygroup")
    trajectory = words.rows[0]
    search, answer = trajectory["turns"][0], trajectory["turns"][-1]
    assert search["advantage_raw"] == search["advantage"] != trajectory["advantage_raw"]
    assert answer["advantage"] == trajectory["advantage_raw"] == pytest.approx(1.5, rel=1e-5)


def test_base_with_advantages_by_turn_keeps_them_without_calibration(explain):
    words = explain(base="querygroup", soft_penalty=False)
    search = words.rows[0]["turns"][0]
    assert search["advantage"] == search["advantage_raw"]
    assert "querygroup: searches are compared with each other" in words.group
    assert "Switched off: advantage.soft_penalty." in words.group


def test_answer_turn_shows_the_rebalancing(explain):
    words = explain()
    last = [row["turns"][-1] for row in words.rows]
    before = [turn["advantage_raw"] * len(turn["ids"]) for turn in last[:4]]
    positive, negative = before[0], -sum(before[1:])
    assert f"sum up to {plain(positive)}, the negative ones to −{plain(negative)}." in words.group
    assert words.group.endswith("The positive side is rescaled until negative / positive = λ = 1.")
    factor, after = negative / positive, last[0]["advantage"]
    assert after == pytest.approx(1.5 * factor, rel=1e-5)
    assert words.turns[0][-1] == f"Answer turn, rescaled: +1.500 × {plain(factor)} = {signed(after)}."
    assert words.turns[1][-1] == ""
    other = explain(adjust="negative", target_ratio=2.0)
    assert other.group.endswith("The negative side is rescaled until negative / positive = λ = 2.")
    assert other.turns[0][-1] == ""
    assert other.turns[1][-1].endswith(f" = {signed(other.rows[1]['turns'][-1]['advantage'])}.")


@pytest.mark.parametrize("name", ["gae", "igpo", "gigpo", "querygroup", "tips"])
def test_estimator_by_turn_never_calibrates_no_turn(explain, name):
    """PPO and its like: "calibrates no turn" and "an advantage of its own" contradict each other."""

    def values(group):
        for trajectory in [*group.trajectories, *group.failed]:
            for turn in trajectory.turns:
                turn.values = np.linspace(0.1, 0.6, len(turn.token_ids), dtype=np.float32)
                turn.golden_logprobs = {"current": -1.0 - len(turn.token_ids), "initial": -2.0}

    words = explain(values, name=name)
    assert (
        f"{name}: {ESTIMATORS[name].token_description}. The number of a trajectory is that of its last"
        in words.group
    )
    assert "calibrates no turn" not in " ".join([words.group, *words.trajectories, *sum(words.turns, [])])


def test_turn_says_how_far_it_is_from_the_teacher(explain):
    def teach(group):
        for turn in group.trajectories[0].turns:
            turn.teacher_logprobs = turn.logprobs - np.float32(0.25)

    words = explain(teach, name="grpo")
    assert all(why.endswith("Reverse KL to the teacher: 0.25 nats a token.") for why in words.turns[0])
    assert not any("teacher" in why for why in words.turns[1])


def test_numbers_have_a_real_minus():
    assert [signed(value) for value in (-1.1547, 0.5, 0.0, -0.0001)] == ["−1.155", "+0.500", "0.000", "0.000"]
    assert [plain(value) for value in (-0.5, 2.0, 1 / 3)] == ["−0.5", "2", "0.333"]
