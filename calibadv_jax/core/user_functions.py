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

from calibadv_jax.core.errors import UserError, one_line

ADDRESS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_THE_USERS = (str(Path(__file__).parents[1]), *_INSTALLED, "<")  # beginnings of file names


def failure(error: BaseException) -> str:
    """Return an error of the user's code as one line: ``TypeError: bad operand (my_reward.py:12)``.

    The place is the innermost line outside this package, Python and installed packages.
    """
    message, place = one_line(error) if str(error) else "", ""
    if isinstance(error, SyntaxError):
        message, place = error.msg, f"{error.filename}:{error.lineno}"
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(_NOT_THE_USERS):
            place = f"{frame.filename}:{frame.lineno}"
    return f"{type(error).__name__}: {message}".removesuffix(": ") + (f" ({place})" if place else "")


def is_address(name: str) -> bool:
    return ADDRESS.fullmatch(name) is not None


def load_optional(name: str) -> ModuleType:
    """Import a module of ``calibadv_jax.contrib`` that a config key needs, such as ``judge``."""
    return importlib.import_module(f"calibadv_jax.contrib.{name}")


@functools.cache  # every step calls it
def import_user_function(
    address: str, key: str, parameters: tuple[str, ...], expected: str
) -> Callable[..., Any]:
    """Import a function of the user's own; `expected` is its signature, for messages.

    Raises UserError if the module cannot be imported, has no such function, or it does not take `parameters`,
    its arguments by position.
    """
    module_name, _, name = address.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_absent = missing and f"{module_name}.".startswith(f"{missing}.")
        advice = "PYTHONPATH must name the folder that holds it" if is_absent else "correct it"
        fault = f"importing {module_name} failed: {failure(error)}"
        raise UserError(f"{key} is {address}, but {fault}; {advice}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{key} is {address}, but {module_name} has no function {name}; expected: {expected}")
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        fault = f"it cannot be called with ({', '.join(parameters)}): {error}"
        raise UserError(f"{key} is {address}, but {fault}; expected: {expected}") from error
    return function
