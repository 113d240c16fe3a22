"""The reasons that the page gives: each says what was done, with the record's own numbers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.generated_run import write_run
from calibadv_jax.advantages.estimators import ESTIMATORS
from calibadv_jax.config import AdvantageConfig, Config
from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.contrib.pages.transcript import plain, signed


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
CARRIED = " calibrates no turn: every turn carries its trajectory's advantage."
REPEATED = "repeats the documents of turn 1, although it found 1 new silver document among its 3: “title c”"
FINDING = "it found 2 new silver documents among its 3: “title a” (weight 1), “title b” (weight 1)"
ONE_SIDE = "One side is empty and nothing can balance the other: they become 0."
# A change of the group, settings, and parts of the words: of turns (trajectory, turn), of trajectories, of
# the group (""). A text that begins with "=" is the whole of them.
CASES = {
    "softened": (None, {}, {
        (1, 0): f"=Softened. Correctness 0.667: {FINDING} (fraction: 2 / 3 = 0.667)."
        " −0.500 × (1 − 0.667) = −0.167.",
        1: "=(0 − 0.25) / 0.5 = −0.500.",
        "": f"{SCORES}Advantage by grpo: (score − mean 0.25) / standard deviation 0.5. {SOFT}",
    }),
    "not softened": (None, {}, {
        (0, 0): "Correctness 1: it found 3 new silver documents",
        (1, 1): "=Not softened. Correctness 0: the search repeats the documents of turn 1.",
        (2, 0): "=Not softened. Correctness 0: it found no silver document.",
        (3, 0): "=", (3, 1): "=", (4, 0): "=",
        3: "=Invalid format: turn 2: no action: none of <search>, <answer>. None of its turns is judged."
        " (0 − 0.25) / 0.5 = −0.500.",
        4: "left out of its group",
    }),
    "all failed": (fail_all, {}, {"": "=No trajectory of this group was finished: nothing is trained."}),
    "repetition": (find_new, {}, {(1, 1): REPEATED}),
    "seen": (see_again, {}, {(1, 1): "Correctness 0: its silver documents had been seen before."}),
    "max": (None, {"correctness": "max"}, {(1, 0): "(max: the largest of these weights = 1)"}),
    "mean": (None, {"correctness": "mean"}, {(1, 0): "(mean: 2 (sum of these weights) / 3 = 0.667)"}),
    "no silver": (answer_wrong, {}, {
        (1, 0): "=", (1, 1): "=", (1, 2): "=", 1: "=",
        "": "=Scores of the finished trajectories: 0, 0, 0, 0. They do not differ, so every advantage is"
        f" 0.000: nothing is learned from this group. {SOFT} Every correctness is 0: the group has no silver"
        " documents (no trajectory in the right format that saw documents scored 0.7 of the largest reward or"
        " more).",
    }),
    "one side": (empty_winner, {}, {
        **dict.fromkeys([(0, 0), (0, 1)], "=No token was sampled: nothing is trained."), "": ONE_SIDE,
    }),
    "switched off": (None, {"soft_penalty": False, "rebalance": False, "normalize_std": False}, {
        (1, 0): "Correctness 0.667", (1, 2): "=", 1: "=0 − 0.25 = −0.250.",
        "": "Switched off: advantage.soft_penalty. Switched off: advantage.rebalance.",
    }),
    "rloo": (None, {"name": "rloo"}, {
        0: "=", 1: "=", 2: "=", (1, 0): "=",
        "": f"={SCORES}Advantage by rloo: score - mean of the others. rloo{CARRIED}",
    }),
    "grpo": (None, {"name": "grpo"}, {(1, 0): "=", "": f" grpo{CARRIED}"}),
    "dr_grpo": (None, {"name": "dr_grpo"}, {0: "=1 − 0.25 = +0.750.", "": "dr_grpo: score − mean 0.25."}),
    "base": (None, {"base": "rloo"}, {(1, 0): "Softened.", "": "rloo: score - mean of the others."}),
    "querygroup": (None, {"name": "querygroup"}, {
        (1, 0): f"Correctness 0.667: {FINDING}", "": "querygroup: searches are compared with each other",
    }),
    "variant": (None, {"rebalance_over": "all", "softening": "aggressive"}, {
        (1, 0): "Correctness 0.667: ", (0, 1): "=",
        "": "CalibAdv with softening=aggressive, rebalance_over=all: each turn shows",
    }),
}  # fmt: skip


@pytest.mark.parametrize(("change", "settings", "expected"), CASES.values(), ids=CASES)
def test_words_of_turns_trajectories_and_group(explain, change, settings, expected):
    words = explain(*[change] * (change is not None), **settings)
    assert words.is_judged == (settings.get("name", "calibadv") in ("calibadv", "querygroup"))
    for place, text in expected.items():
        shown = words.group if place == "" else None
        if shown is None:
            shown = words.turns[place[0]][place[1]] if isinstance(place, tuple) else words.trajectories[place]
        assert shown == text[1:] if text.startswith("=") else text in shown, place


def test_explanation_of_a_group_stands_once(explain):
    """What holds for the whole group is in none of the columns."""
    words = explain()
    columns = [*words.trajectories, *sum(words.turns, [])]
    for sentence in ("Scores of", "standard deviation", "Soft penalty", "Rebalancing", "sum up to"):
        assert words.group.count(sentence) == 1 and sentence not in " ".join(columns), sentence
    long = [text for text in columns if len(text) > 80]
    assert len(set(long)) == len(long)


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
        f"{name}: {ESTIMATORS[name].carried}. The number of a trajectory is that of its last" in words.group
    )
    assert "calibrates no turn" not in " ".join([words.group, *words.trajectories, *sum(words.turns, [])])


def test_numbers_have_a_real_minus():
    assert [signed(value) for value in (-1.1547, 0.5, 0.0, -0.0001)] == ["−1.155", "+0.500", "0.000", "0.000"]
    assert [plain(value) for value in (-0.5, 2.0, 1 / 3)] == ["−0.5", "2", "0.333"]
