"""Functions that are named as ``package.module:function``: the user's own, and those of registries."""

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

# Beginnings of the file names of code that is not the user's: this package, Python and installed packages,
# and generated code such as <string>.
_FOREIGN_CODE = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    "<",
)


def describe_failure(error: BaseException) -> str:
    """Return an error of the user's code as one line: ``TypeError: bad operand (my_reward.py:12)``.

    The place is the innermost line of the user's own code. It is left out if there is none.
    """
    message = one_line(error) if str(error) else ""
    place = ""
    if isinstance(error, SyntaxError):
        message = error.msg
        place = f"{error.filename}:{error.lineno}"
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(_FOREIGN_CODE):
            place = f"{frame.filename}:{frame.lineno}"
    text = f"{type(error).__name__}: {message}".removesuffix(": ")
    return f"{text} ({place})" if place else text


def is_address(name: str) -> bool:
    """Return whether a text has the form ``package.module:function``."""
    return ADDRESS.fullmatch(name) is not None


def load_optional(name: str) -> ModuleType:
    """Import a module of ``calibadv_jax.contrib`` by its name, such as ``judge``."""
    return importlib.import_module(f"calibadv_jax.contrib.{name}")


# Cached, since every training step calls it.
@functools.cache
def load_function(address: str) -> Callable[..., Any]:
    """Import a function of this project, named as ``package.module:function``."""
    module_name, _, name = address.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    return function


@functools.cache
def import_user_function(
    address: str, key: str, parameters: tuple[str, ...], expected: str
) -> Callable[..., Any]:
    """Import a function of the user's own.

    Args:
        address: ``package.module:function``.
        key: Config key that names the function, for messages.
        parameters: Names of the arguments that the function has to take, by position.
        expected: Signature of the function, for messages.

    Raises:
        UserError: The module cannot be imported or has no such function, or the function does not take the
            arguments.
    """
    module_name, _, name = address.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        advice = "correct it"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            # The module itself or one of its packages is missing, and not a module that it imports.
            advice = "PYTHONPATH must name the folder that holds it"
        raise UserError(
            f"{key} is {address}, but importing {module_name} failed: {describe_failure(error)}; {advice}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{key} is {address}, but {module_name} has no function {name}; expected: {expected}")
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key} is {address}, but it cannot be called with ({', '.join(parameters)}): {error}; "
            f"expected: {expected}"
        ) from error
    return function
