"""Advantages for other trainers equal those of the trainer here."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.advantages.external import (
    AdvantageSettings,
    TrajectoryRecord,
    TurnRecord,
    step_advantages,
    token_advantages,
    turn_advantages,
)
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import ESTIMATORS

GROUP = [  # docs/calibadv.md: score, format, and for each turn kind, tokens, documents, thought
    (1.0, True, [("search", 8, "ACD", "find"), ("search", 12, "BEF", "based in"), ("answer", 10, "", "x")]),
    (1.0, True, [("search", 8, "ACD", "where"), ("search", 12, "BEG", "who is"), ("answer", 10, "", "y")]),
    (0.5, True, [("search", 8, "ACH", "find"), ("answer", 12, "", "z")]),
    (0.0, True, [("search", 8, "AHI", "look"), ("search", 12, "BFK", "based"), ("answer", 30, "", "many")]),
    (0.0, False, [("search", 6, "BEF", ""), ("answer", 20, "", "w")]),
]
RECORDS = [
    TrajectoryRecord(
        score, valid, [TurnRecord(kind, count, list(ids), think) for kind, count, ids, think in turns]
    )
    for score, valid, turns in GROUP
]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_ratio": 2.0, "correctness": "max"},
        {"softening": "upper_limit", "rebalance_over": "turn"},
        {"name": "rloo"},
        {"base": "opo", "adjust": "negative"},
    ],
    ids=str,
)
def test_advantages_equal_the_trainers(build, settings):
    members = [
        (score, valid, [build.turn(kind, think, ids, count) for kind, count, ids, think in turns])
        for score, valid, turns in GROUP
    ]
    result = compute_advantages([build.group(*members)], AdvantageConfig(**settings))
    ours = turn_advantages(RECORDS, AdvantageSettings(**settings))
    for advantages, turns in zip(ours, result.credits[0].turns, strict=True):
        np.testing.assert_array_equal(advantages, turns)
    for advantages, by_token, (*_, turns) in zip(ours, result.advantages[0], GROUP, strict=True):
        counts = [count for _, count, *_ in turns]
        spread = token_advantages(advantages, counts, np.ones(sum(counts), bool))
        np.testing.assert_array_equal(spread, by_token)


def choices(section):
    hints = get_type_hints(section)
    return {key: get_args(hint) for key, hint in hints.items() if get_origin(hint) is Literal}


def test_settings_have_the_configs_keys_and_defaults():
    config = dataclasses.asdict(AdvantageConfig()) | {"probes": ()}
    del config["args"]  # only for functions of the user's own
    assert dataclasses.asdict(AdvantageSettings()) == config
    assert choices(AdvantageSettings) == choices(AdvantageConfig) != {}


def takes(section, key, value):
    """Whether a section takes a value; a refusal is one line that names key and value."""
    try:
        section(**{key: value})
    except UserError as error:
        assert str(error).startswith(f"{key} is {value!r}; ") and "\n" not in str(error)
        return False
    except ValueError:
        return False
    return True


NUMBERS = [-1, -1e-9, 0, 1e-9, 0.5, 1, 1.001, 7, float("inf"), -float("inf"), float("nan"), np.float32(0.5)]
BOUNDED = [field.name for field in dataclasses.fields(AdvantageSettings) if field.type == "float"]


@pytest.mark.parametrize("key", BOUNDED)
def test_numbers_have_the_configs_bounds(key):
    taken = [number for number in NUMBERS if takes(AdvantageSettings, key, number)]
    assert taken == [number for number in NUMBERS if takes(AdvantageConfig, key, number)] != []


@pytest.mark.parametrize("field", dataclasses.fields(AdvantageSettings), ids=lambda field: field.name)
def test_setting_of_another_type_is_refused(field):
    for value in ("no", None, [0.5], np.zeros(2), ["no"]):
        if not (field.type == "str" and isinstance(value, str)):
            with pytest.raises(UserError, match=f"^{field.name} is "):
                AdvantageSettings(**{field.name: value})
    assert takes(AdvantageSettings, field.name, field.default)


MALFORMED = [  # values of a TurnRecord, words of the message
    (("Invalid", 2), "kind is 'Invalid', which would count as an action; write 'invalid'"),
    (("</answer>", 2), "write 'answer'"),
    (("", 2), "kind is ''"),
    ((None, 2), "kind is None"),
    (("search", -1), "num_tokens is -1"),
    (("search", 2.0), "num_tokens is 2.0"),
    (("search", "2"), "num_tokens is '2'"),
    (("search", True), "num_tokens is True"),
    (("search", None), "num_tokens is None"),
    (("search", 2, "abc"), "documents is 'abc'; it is a list of document ids"),
    (("search", 2, b"abc"), "documents is b'abc'"),
    (("search", 2, {"a", "b"}), "in order"),
    (("search", 2, {"a": 1}), "documents is {'a': 1}"),
    (("search", 2, None), "documents is None"),
    (("search", 2, [1, 2]), "documents holds 1; ids of documents are strings"),
    (("search", 2, [("a", "text")]), "documents holds ('a', 'text')"),
    (("search", 2, ["a"], None), "thought is None"),
]


@pytest.mark.parametrize(("values", "message"), MALFORMED)
def test_malformed_turn_is_refused(values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        TurnRecord(*values)


TURNS = [TurnRecord("answer", 4)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("0.5", True, TURNS), "score is '0.5'; it is a number"),
        ((None, True, TURNS), "score is None"),
        ((np.ones(2), True, TURNS), "score is array"),
        ((1.0, "no", TURNS), "format_valid is 'no'; it is True or False"),
        ((1.0, None, TURNS), "format_valid is None"),
        ((1.0, float("nan"), TURNS), "format_valid is nan"),
        ((1.0, True, TURNS[0]), "turns is TurnRecord"),
        ((1.0, True, None), "turns is None; it is a list of TurnRecord"),
        ((1.0, True, [("answer", 4)]), "turn 0 is ('answer', 4); make a TurnRecord of it"),
    ],
)
def test_malformed_trajectory_is_refused(values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        TrajectoryRecord(*values)


def test_values_of_numpy_and_tuples_are_records():
    turn = TurnRecord("search", np.int64(2), ("a", np.str_("b")), "t")
    numpy_group = [
        TrajectoryRecord(np.float32(score), np.bool_(valid), (turn, *TURNS))
        for score, valid in ((1, 1), (0, 0))
    ]
    plain_turn = TurnRecord("search", 2, ["a", "b"], "t")
    plain_group = [
        TrajectoryRecord(1.0, True, [plain_turn, *TURNS]),
        TrajectoryRecord(0, 0, [plain_turn, *TURNS]),
    ]
    for ours, plain in zip(turn_advantages(numpy_group), turn_advantages(plain_group), strict=True):
        np.testing.assert_array_equal(ours, plain)
    with pytest.raises(UserError, match=r"^trajectory 1 is \(0, True\); make a TrajectoryRecord"):
        turn_advantages([numpy_group[0], (0, True)])


STEP_SETTINGS = [
    {"std_over": "step"},
    {"rebalance_within": "step"},
    {"name": "gpg"},
    {"base": "reinforce_plus_plus"},
    {"name": "reinforce_plus_plus_baseline"},
]


@pytest.mark.parametrize("settings", STEP_SETTINGS, ids=str)
def test_settings_of_the_whole_step_need_all_groups(build, settings):
    """One group alone would silently be the step."""
    second = [dataclasses.replace(record, score=0.2 + record.score / 4) for record in RECORDS[::-1]]
    groups = []
    for records in (RECORDS, second):
        members = []
        for record in records:
            turns = [
                build.turn(turn.kind, turn.thought, turn.documents, turn.num_tokens) for turn in record.turns
            ]
            members.append((record.score, record.format_valid, turns))
        groups.append(build.group(*members))
    result = compute_advantages(groups, AdvantageConfig(**settings))
    ours = step_advantages([RECORDS, second], AdvantageSettings(**settings))
    for credit, group in zip(result.credits, ours, strict=True):
        for expected, advantages in zip(credit.turns, group, strict=True):
            np.testing.assert_array_equal(advantages, expected)
    alone = step_advantages([RECORDS], AdvantageSettings(**settings))
    assert not all(map(np.array_equal, alone[0], ours[0]))
    with pytest.raises(UserError, match="turn_advantages gets one question; call step_advantages"):
        turn_advantages(RECORDS, AdvantageSettings(**settings))
    with pytest.raises(UserError, match="^group 1, trajectory 0: score is inf"):
        step_advantages([RECORDS, [dataclasses.replace(RECORDS[0], score=float("inf"))]])


@pytest.mark.parametrize(
    ("advantages", "counts", "mask", "message"),
    [
        ([0.5], [2, 1], [True] * 3, "advantages of 1 turns, but numbers of tokens of 2"),
        ([0.5, 1.0], [4, -1], [True] * 3, "num_tokens holds -1"),
        ([0.5, 1.0], [2.0, 1], [True] * 3, "num_tokens holds 2.0"),
        ([0.5, 1.0], [2, 1], [[True] * 3], "the mask has the shape (1, 3)"),
    ],
)
def test_tokens_that_do_not_fit_the_turns_are_refused(advantages, counts, mask, message):
    with pytest.raises(UserError, match=re.escape(message)):
        token_advantages(np.array(advantages), counts, np.array(mask))


def test_observations_and_padding_get_no_advantage():
    mask = np.array([1, 1, 0, 0, 1, 0], bool)
    np.testing.assert_array_equal(
        token_advantages(np.array([0.5, -1.0]), [2, 1], mask), np.float32([0.5, 0.5, 0, 0, -1, 0])
    )
    with pytest.raises(UserError, match="3 sampled tokens, but the turns have 4"):
        token_advantages(np.array([0.5, -1.0]), [2, 2], mask)


NEEDY = [name for name, entry in ESTIMATORS.items() if entry.needs]


@pytest.mark.parametrize("name", [*NEEDY, "gigpo", "mt_grpo", "nonsense"])
def test_estimator_without_its_inputs_is_refused(name):
    with pytest.raises(UserError, match=f"{name}' cannot.*use one of grpo"):
        turn_advantages(RECORDS, AdvantageSettings(name=name))
    with pytest.raises(UserError, match="trajectory 1: score is nan"):
        turn_advantages([RECORDS[0], dataclasses.replace(RECORDS[1], score=float("nan"))])


def test_import_needs_neither_jax_nor_pydantic():
    code = (
        "import sys, calibadv_jax.advantages.external;"
        "print(sorted({'jax', 'flax', 'pydantic', 'omegaconf', 'vllm', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=250).strip() == "[]"
