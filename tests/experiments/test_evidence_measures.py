"""What counts as a collapse, as a warning of one, and as an interval."""

import pytest

from experiments import measures

pytestmark = pytest.mark.medium  # of a benchmark's program


def by_step(values):
    return dict(enumerate(values, 1))


def fell(high, low, until=20, steps=40):
    """`high` up to a step, and `low` after it."""
    return by_step([high] * until + [low] * (steps - until))


FINE = by_step([1.0] * 40)
OTHERS = [by_step([1.0, 3.0]), by_step([2.0, 2.0])]


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
        (fell(1.0, 0.0, until=25), fell(1.0, 0.0), 26),  # whichever comes first
        (fell(1.0, 0.0, until=15), fell(1.0, 0.0), 21),
        (FINE, {}, None),
    ],
)
def test_collapse(reward, format_valid, step):
    assert measures.collapse_step(reward, format_valid) == step


def test_intervals_are_students_and_exact():
    """Of means and of shares; t(0.975, 4) = 2.77645, standard deviation sqrt(2.5)."""
    assert measures.mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert measures.mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - 1.96324, 3 + 1.96324), abs=1e-4)
    assert measures.mean_interval([0.4]) is None
    assert measures.running_mean({1: 1.0, 2: 2.0, 3: 6.0, 5: 1.0}, 3) == {3: 3.0, 5: 3.0}
    for count, low, high in ((0, 0.0, 0.5218), (5, 0.4782, 1.0), (2, 0.0527, 0.8534)):
        assert measures.share_interval(count, 5) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("values", "others", "expected"),
    [
        (by_step([1.0, 3.0, 2.0, 1.0, 3.0]), OTHERS, None),  # the ends belong to the range
        (by_step([2, 4, 4, 2, 4, 4, 4, 4]), OTHERS, measures.Departure(7, "above")),
        (by_step([0, 0, 2, 0, 0, 0]), OTHERS, measures.Departure(6, "below")),
        (by_step([4, 0, 4, 0, 4, 0]), OTHERS, None),  # not three on one side
        (by_step([4, 4]), OTHERS, None),
        # Others rise: 20 at step 20 is usual, at step 31 too little, for 21 was at step 21.
        (dict.fromkeys(range(10, 41), 20.0), [by_step(range(1, 41))], measures.Departure(33, "below")),
        (dict.fromkeys(range(52, 61), 20.0), [by_step(range(1, 41))], None),  # nothing to compare with
    ],
)
def test_three_steps_outside_the_range_warn(values, others, expected):
    assert measures.first_departure(values, others) == expected
