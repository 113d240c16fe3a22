"""A function of the user's own, named in a config as ``package.module:function``."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from calibadv_jax.core.errors import UserError

ADDRESS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_OTHERS = (str(Path(__file__).parents[1]), *_INSTALLED, "<")  # whose code is none of the user's


def failure(error: BaseException) -> str:
    """Return ``TypeError: bad operand (my_reward.py:12)``, in one line: an error in the user's own code.

    The place is the innermost line that belongs neither to this package nor to Python or an installed one.
    """
    message, place = " ".join(str(error).split())[:300], ""
    if isinstance(error, SyntaxError):
        message, place = error.msg, f"{error.filename}:{error.lineno}"
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(_OTHERS):
            place = f"{frame.filename}:{frame.lineno}"
    return f"{type(error).__name__}: {message}".removesuffix(": ") + (f" ({place})" if place else "")


def is_address(name: str) -> bool:
    return ADDRESS.fullmatch(name) is not None


def load_optional(name: str) -> ModuleType:
    """Import a module of ``calibadv_jax.contrib`` that a config key asks for, such as ``judge``."""
    return importlib.import_module(f"calibadv_jax.contrib.{name}")


@functools.cache  # every step asks for it
def own_function(address: str, key: str, parameters: tuple[str, ...], expected: str) -> Callable[..., Any]:
    """Imports the function, once.

    Args:
        key: of the config, for messages.
        parameters: what it is called with, by position.
        expected: its whole signature, for messages.

    Raises:
        UserError: the module cannot be imported, has no such function, or it takes other parameters.
    """
    module_name, _, name = address.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        missing = (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module_name}.".startswith(f"{error.name}.")
        )
        advice = "PYTHONPATH must name the folder that holds it" if missing else "correct it"
        raise UserError(
            f"{key} is {address}, but importing {module_name} failed: {failure(error)}; {advice}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{key} is {address}, but {module_name} has no function {name}; expected: {expected}")
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key} is {address}, but it cannot be called with ({', '.join(parameters)}): {error};"
            f" expected: {expected}"
        ) from error
    return function
