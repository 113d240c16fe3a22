"""Advantages for other trainers equal those of the trainer here."""

from __future__ import annotations

import dataclasses
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
    TrajectoryRecord(score, valid, [TurnRecord(*turn) for turn in turns]) for score, valid, turns in GROUP
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
    assert dataclasses.asdict(AdvantageSettings()) == config
    assert choices(AdvantageSettings) == choices(AdvantageConfig) != {}


@pytest.mark.parametrize("key", [*choices(AdvantageConfig), "target_ratio"])
def test_setting_that_the_config_refuses_is_refused(key):
    with pytest.raises(UserError, match=f"^{key} is "):
        AdvantageSettings(**{key: 0})


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
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "[]"
