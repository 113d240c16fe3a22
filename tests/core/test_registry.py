"""Every entry of a registry names a function that exists."""

import inspect

import pytest

from calibadv_jax.core.registry import ANSWER_REWARDS, ESTIMATORS, LOSSES
from calibadv_jax.core.user_functions import load_function


@pytest.mark.parametrize(
    ("address", "parameters"),
    [
        *((entry.address, ["tokens", "config"]) for entry in LOSSES.values()),
        *((entry.address, ["groups", "config"]) for entry in ESTIMATORS.values()),
        *((address, ["prediction", "golden_answers"]) for address in ANSWER_REWARDS.values()),
    ],
)
def test_address_names_a_function_with_the_right_arguments(address, parameters):
    assert list(inspect.signature(load_function(address)).parameters) == parameters


@pytest.mark.parametrize("entry", [entry for entry in LOSSES.values() if entry.batch_factor])
def test_batch_factor_exists(entry):
    assert callable(load_function(entry.batch_factor))


def test_needs_are_known():
    assert {entry.needs for entry in ESTIMATORS.values()} == {"", "current", "initial", "critic"}
