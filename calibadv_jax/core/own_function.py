"""A function of the user's own, named in a config as ``package.module:function``."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from calibadv_jax.core.errors import UserError

ADDRESS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_address(name: str) -> bool:
    return ADDRESS.fullmatch(name) is not None


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
        raise UserError(
            f"{key} is {address}, but importing {module_name} failed ({type(error).__name__}:"
            f" {' '.join(str(error).split())}): PYTHONPATH must name the folder that holds it"
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
