"""A user's own function: loaded by its name, checked at the start, calibrated like any other."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages, describe
from calibadv_jax.config import parse_config
from calibadv_jax.core import user_functions
from calibadv_jax.core.errors import UserError

EXAMPLE = "examples.own_advantage:by_rank"
NUMBERS = itertools.count()


def advantage_config(name, key="name"):
    """The section as a run reads it, from a file and an override."""
    return parse_config("{}", "file.yaml", [f"advantage.{key}={name}"]).advantage


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a function in a module of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source):
        module = f"own_module_{next(NUMBERS)}"
        (tmp_path / f"{module}.py").write_text(source)
        return f"{module}:mine"

    return write


@pytest.fixture
def group(build):
    def turns(*documents):
        return [build.turn(documents=documents, num_observed=1), build.turn("answer", num_tokens=2)]

    return build.group((1.0, True, turns("a")), (0.5, True, turns("x", "a")), (0.0, True, turns("y")))


def test_example_through_the_config(group):
    config = advantage_config(EXAMPLE)
    (credit,) = compute_advantages([group], config).credits
    np.testing.assert_allclose(credit.turns, [[1 / 3, 2 / 3], [0, 0], [-1 / 3, -2 / 3]])
    np.testing.assert_allclose(credit.raw, [2 / 3, 0, -2 / 3])
    assert "a function of your own" in describe(config)[0]
    assert "The share of the group that a trajectory beats" in describe(config)[1]


def test_one_number_per_trajectory_is_enough(group, own):
    source = "def mine(groups, config):\n    '''1 to {3}.'''\n    return [[1.0, 2.0, 3.0]]\n"
    config = advantage_config(own(source))
    assert describe(config)[1] == "advantage = 1 to {3}."
    (credit,) = compute_advantages([group], config).credits
    np.testing.assert_array_equal(credit.turns, [[1, 1], [2, 2], [3, 3]])


def test_own_function_sees_the_groups(group, own):
    name = own(
        "def mine(groups, config):\n"
        "    return [[one.answer_score for one in group.trajectories] for group in groups]\n"
    )
    (credit,) = compute_advantages([group], advantage_config(name)).credits
    np.testing.assert_array_equal(credit.turns, [[1, 1], [0.5, 0.5], [0, 0]])


@pytest.mark.parametrize("key", ["name", "base"])
def test_own_function_gets_its_arguments(group, own, key):
    name = own("def mine(groups, config, *, scale):\n    'Mine.'\n    return [[scale, 0.0, -scale]]\n")
    config = parse_config(
        "{}", "file.yaml", [f"advantage.{key}={name}", "advantage.args={scale: 3}"]
    ).advantage
    assert describe(config)[1] == "advantage = Mine."
    (credit,) = compute_advantages([group], config).credits
    np.testing.assert_array_equal(credit.raw, [3, 0, -3])


@pytest.mark.parametrize("arguments", ["{}", "{scale: 3, other: 1}"])
def test_arguments_that_an_own_function_does_not_take_are_refused(own, arguments):
    name = own("def mine(groups, config, *, scale):\n    return []\n")
    overrides = [f"advantage.name={name}", f"advantage.args={arguments}"]
    with pytest.raises(UserError, match=f"advantage.name is {name}, but it cannot be called with"):
        describe(parse_config("{}", "file.yaml", overrides).advantage)


def test_arguments_without_an_own_function_are_refused():
    with pytest.raises(
        UserError, match="advantage.args is set, but no function of your own is the estimator"
    ):
        parse_config("advantage: {name: grpo, args: {scale: 3}}", "file.yaml")


def test_own_function_is_checked_once_in_all_steps(group, own, monkeypatch):
    config = advantage_config(own("def mine(groups, config):\n    return [[1.0, 2.0, 3.0]]\n"))
    checked, signature = [], user_functions.inspect.signature

    def noting(function):
        checked.append(function.__name__)
        return signature(function)

    monkeypatch.setattr(user_functions.inspect, "signature", noting)
    describe(config)
    for _ in range(3):
        compute_advantages([group], config)
    assert checked == ["mine"]


def test_example_is_calibrated(group):
    group.trajectories[2].answer_score = 0.5  # two losers, one of which found a silver document
    config = advantage_config(EXAMPLE, "base")
    assert describe(config)[0] == f"advantage calibadv: {EXAMPLE} calibrated by turn"
    (credit,) = compute_advantages([group], config).credits
    np.testing.assert_allclose(credit.before, [[1 / 3, 2 / 3], [-1 / 6, -1 / 3], [-1 / 6, -1 / 3]])
    # The second one's search found one silver document among two.
    np.testing.assert_allclose(credit.turns, [[1 / 3, 2 / 3], [-1 / 12, -1 / 3], [-1 / 6, -1 / 3]])


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ("def mine(group):\n    return []\n", "too many positional arguments; expected: def advantages("),
        ("def mine(groups, config, more):\n    pass\n", "missing a required argument: 'more'; expected:"),
        ("mine = 3\n", "has no function mine; expected: def"),
        ("def other(groups, config):\n    return []\n", "has no function mine; expected: def"),
        ("import nowhere_at_all\n", "No module named 'nowhere_at_all'"),
        ("x = 3\ndef mine(\n", ".py:2); correct it"),
        ("raise RuntimeError('half\\nwritten')", "RuntimeError: half written (/"),
        (None, "No module named 'nowhere'; PYTHONPATH must name the folder"),
    ],
)
def test_uncallable_own_function_is_refused(own, source, phrase):
    name = own(source) if source else "nowhere.module:mine"
    with pytest.raises(UserError) as error:
        describe(advantage_config(name))
    assert str(error.value).startswith(f"advantage.name is {name}, but ") and phrase in str(error.value)
    assert "\n" not in str(error.value)


def test_own_function_with_a_syntax_error_is_named(own):
    name = own("def mine(\n")
    with pytest.raises(UserError, match=f"^advantage.name is {name}, but importing .* was never closed"):
        describe(advantage_config(name))


@pytest.mark.parametrize(
    "source",
    [
        "def mine(group):\n    return []\n",
        "def mine(groups, config, more):\n    return []\n",
        "mine = 3\n",
        "def other(groups, config):\n    return []\n",
    ],
)
def test_refusal_shows_the_signature(own, source):
    with pytest.raises(UserError) as error:
        describe(advantage_config(own(source)))
    signature = "def advantages(groups: Sequence[Group], config: AdvantageConfig)"
    assert f"; expected: {signature}" in str(error.value)


@pytest.mark.parametrize(
    ("result", "phrase"),
    [
        ("[]", "shorter"),
        ("[[1.0]]", "1 advantages for 3 trajectories"),
        ("[[1.0, 0.0, [1.0, 2.0, 3.0]]]", "shape (3,) for a trajectory of 2 turns"),
        ("[[1.0, 0.0, float('nan')]]", "not finite"),
        ("None", "NoneType"),
        ("[['a', 'b', 'c']]", "could not convert"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero (/"),
        ("numpy.reshape([1], (2, 2))", "failed: ValueError: cannot reshape array"),  # not numpy's own line
    ],
)
def test_own_result_of_wrong_shape_is_refused(own, group, result, phrase):
    name = own(
        f"import numpy\ndef mine(groups, config):\n    return helper()\ndef helper():\n    return {result}\n"
    )
    with pytest.raises(UserError) as error:
        compute_advantages([group], advantage_config(name))
    message = str(error.value)
    assert name in message and phrase in message and "\n" not in message
    assert (".py:5); correct it" if "failed" in phrase else "one list for each group") in message
    assert message.startswith(f"advantages: {name} failed: " if "failed" in phrase else f"{name}: ")


@pytest.mark.parametrize("name", ["rlo", "calibadv ", "a.b", "a:b:c", "a b:c", ":mine", "", "a/b.py:mine"])
def test_refused_name_lists_the_estimators(name):
    with pytest.raises(
        UserError, match="advantage.name: must be one of calibadv, grpo, .*my_package.my_module:function"
    ):
        parse_config(json.dumps({"advantage": {"name": name}}), "file.yaml")


@pytest.mark.parametrize("name", ["rlo", "calibadv ", "a.b", "a:b:c", "a b:c", ":mine", "", "a/b.py:mine"])
def test_other_names_are_refused(name):
    for key in ("name", "base"):
        with pytest.raises(
            UserError, match=f"advantage.{key}: must be one of .*my_package.my_module:function"
        ):
            parse_config(json.dumps({"advantage": {key: name}}), "file.yaml")
    with pytest.raises(UserError, match="advantage.base: must be one of grpo, "):
        advantage_config("calibadv", "base")
