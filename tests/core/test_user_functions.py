"""The hash of the user's own code: which files it covers."""

from __future__ import annotations

import hashlib
import importlib
import itertools

import pytest

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import content_hash
from calibadv_jax.core.user_functions import import_user_function, source_hash

NUMBERS = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes the files of a new package, and returns the package's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sources):
        name = f"own_package_{next(NUMBERS)}"
        (tmp_path / name).mkdir()
        for module, source in {"__init__": "", **sources}.items():
            (tmp_path / name / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    return write


def digest(folder, name):
    return hashlib.sha256((folder / f"{name}.py").read_bytes()).hexdigest()


def test_hash_covers_the_users_modules_and_no_installed_ones(package, tmp_path):
    name = package(
        reward="import numpy\nimport json\nfrom . import words\nfrom calibadv_jax import Trajectory\n",
        words="from .letters import A\n",
        letters="A = 1\nfrom . import reward\n",  # a circle
        unused="B = 2\n",
    )
    folder = tmp_path / name
    files = {f"{name}.{module}": digest(folder, module) for module in ("reward", "words", "letters")}
    files[name] = digest(folder, "__init__")
    assert source_hash([f"{name}.reward:mine"], "reward") == content_hash(sorted(files.items()))


def test_code_without_a_file_has_no_hash():
    assert source_hash([], "reward") == ""
    assert source_hash(["sys:exit"], "reward") == ""


def test_module_of_an_installed_package_is_hashed_alone():
    module = importlib.import_module("yaml")
    with open(module.__file__, "rb") as file:
        digests = [("yaml", hashlib.sha256(file.read()).hexdigest())]
    assert source_hash(["yaml:load"], "reward") == content_hash(digests)


def test_module_that_cannot_be_imported_is_refused():
    with pytest.raises(
        UserError, match="loss is nowhere_of_tests:mine, but importing nowhere_of_tests failed"
    ):
        source_hash(["nowhere_of_tests:mine"], "loss")


def test_arguments_that_the_function_does_not_take_are_refused(package):
    name = package(reward="def mine(trajectory, cost):\n    return cost\n")
    address = f"{name}.reward:mine"
    function = import_user_function(
        address, "reward.answer", ("trajectory",), "reward(trajectory)", ("cost",)
    )
    assert function(None, cost=2) == 2
    for keywords, problem in [
        ((), "'cost'"),
        (("cost", "other"), "'other'"),
        (("trajectory",), "trajectory"),
    ]:
        with pytest.raises(
            UserError, match=f"reward.answer is {address}, but it cannot be called.*{problem}"
        ):
            import_user_function(address, "reward.answer", ("trajectory",), "reward(trajectory)", keywords)
