"""What counts as a collapse, as a warning of one, and as an interval."""

import pytest

from experiments.measures import (
    Departure,
    collapse_step,
    first_departure,
    mean_interval,
    running_mean,
    share_interval,
)


def by_step(values):
    return dict(enumerate(values, 1))


def fell(high, low, at=20, steps=40):
    """`high` up to a step, and `low` after it."""
    return by_step([high] * at + [low] * (steps - at))


FINE = by_step([1.0] * 40)


@pytest.mark.parametrize(
    ("reward", "format_valid", "step"),
    [
        (fell(0.8, 0.32), FINE, 29),  # nine of ten steps at 0.32: 0.368 < 0.4
        (fell(1.0, 0.5), FINE, None),  # half of the maximum is not below it
        (by_step([0.1] * 20 + [0.9] * 20), FINE, None),  # a later maximum is no earlier one
        (by_step([0.8] * 20 + [0.0] * 4 + [0.8] * 16), FINE, None),  # a few bad steps
        (by_step([0.8] * 5 + [0.0] * 4), FINE, None),  # no ten steps yet
        (by_step([0.2] * 10 + [0.9] * 20 + [0.42] * 20), FINE, 40),  # of the largest mean, not of the first
        (FINE, fell(1.0, 0.0), 26),  # six of ten: 0.4
        (FINE, fell(1.0, 0.5), None),
        (fell(1.0, 0.0, at=25), fell(1.0, 0.0), 26),  # whichever comes first
        (fell(1.0, 0.0, at=15), fell(1.0, 0.0), 21),
        (FINE, {}, None),
    ],
)
def test_collapse(reward, format_valid, step):
    assert collapse_step(reward, format_valid) == step


def test_running_mean_ends_at_its_step():
    assert running_mean({1: 1.0, 2: 2.0, 3: 6.0, 5: 1.0}, 3) == {3: 3.0, 5: 3.0}


def test_intervals_are_students_and_exact():
    """Of means and of shares; t(0.975, 4) = 2.77645, standard deviation sqrt(2.5)."""
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - 1.96324, 3 + 1.96324), abs=1e-4)
    assert mean_interval([0.4]) is None
    for count, low, high in ((0, 0.0, 0.5218), (5, 0.4782, 1.0), (2, 0.0527, 0.8534)):
        assert share_interval(count, 5) == pytest.approx((low, high), abs=1e-4)


OTHERS = [by_step([1.0, 3.0]), by_step([2.0, 2.0])]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 3.0, 2.0, 1.0, 3.0], None),  # the ends belong to the range
        ([2, 4, 4, 2, 4, 4, 4, 4], Departure(7, "above")),
        ([0, 0, 2, 0, 0, 0], Departure(6, "below")),
        ([4, 0, 4, 0, 4, 0], None),  # not three on one side
        ([4, 4], None),
    ],
)
def test_three_steps_outside_the_range_warn(values, expected):
    assert first_departure(by_step(values), OTHERS) == expected


def test_range_is_of_the_steps_around():
    """Other runs rise: 20 at step 20 is usual, 20 at step 31 is too little, for 21 was at step 21."""
    rising = {step: float(step) for step in range(1, 41)}
    assert first_departure(dict.fromkeys(range(10, 41), 20.0), [rising]) == Departure(33, "below")
    assert first_departure(dict.fromkeys(range(52, 61), 20.0), [rising]) is None  # nothing to compare with
