"""Credit assignment against the authors' values (when present) and our own hand-worked cases."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages

LOCAL = Path(__file__).resolve().parents[1] / "golden_local" / "credit_cases.json"


def assert_agrees(case: dict, build) -> None:
    read = build.case(case)
    result = compute_advantages(read.groups, read.config)
    for positions, advantages, credit in zip(read.positions, result.advantages, result.credits, strict=True):
        for member, position in enumerate(positions):
            where = f"{case['name']}, trajectory {position}"
            expected = np.array(case["expected"]["advantages"][position], np.float64)
            assert advantages[member].dtype == np.float32
            np.testing.assert_allclose(advantages[member], expected, rtol=1e-4, atol=1e-5, err_msg=where)
            is_search = [turn["kind"] == "search" for turn in case["trajectories"][position]["turns"]]
            np.testing.assert_allclose(
                credit.correctness[member][is_search],
                case["expected"]["correctness"][position],
                rtol=1e-4,
                atol=1e-5,
                err_msg=where,
            )


@pytest.mark.parametrize("case", json.loads(LOCAL.read_text(encoding="utf-8")), ids=lambda case: case["name"])
def test_hand_worked(case, build):
    assert_agrees(case, build)


@pytest.fixture(scope="module")
def authors_cases(shared):
    return json.loads((shared / "golden" / "calibadv_cases.json").read_text(encoding="utf-8"))


def test_authors_values(authors_cases, build):
    assert len(authors_cases) == 43
    for case in authors_cases:
        assert_agrees(case, build)


def test_authors_values_of_plain_grpo_are_grpo(authors_cases, build):
    plain = [case for case in authors_cases if "plain_grpo" in case["name"]]
    assert plain
    for case in plain:
        read = build.case(case)
        result = compute_advantages(read.groups, dataclasses.replace(read.config, name="grpo"))
        for positions, advantages in zip(read.positions, result.advantages, strict=True):
            for position, values in zip(positions, advantages, strict=True):
                expected = case["expected"]["advantages"][position]
                np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
