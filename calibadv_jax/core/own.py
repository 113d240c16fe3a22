"""Loads a user's own function that a config names as ``my_package.my_module:function``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from calibadv_jax.core.errors import UserError

PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"  # of the whole name


def load_own(key: str, name: str, parameters: Sequence[str], example: str) -> Callable[..., Any]:
    """The function, after a check that it can be called with these parameters in this order.

    Modules are looked for where Python looks, and then in the working directory.

    Args:
        key: of the config, for messages.
        name: module and function, as PATTERN.
        example: a file that shows such a function, for messages.

    Raises:
        UserError: there is no such module or function, or it takes other parameters.
    """
    module_name, _, function_name = name.partition(":")
    expected = f"expected def {function_name}({', '.join(parameters)}), as in {example}"
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, SyntaxError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{key}={name}: cannot be loaded: {reason}; {expected}") from error
    try:
        signature = inspect.signature(function)
        signature.bind(*parameters)
    except (TypeError, ValueError) as error:  # no function; or a builtin that does not say what it takes
        reason = " ".join(str(error).split())
        raise UserError(f"{key}={name}: cannot be called as it must be: {reason}; {expected}") from error
    return function
