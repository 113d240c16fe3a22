"""Functions that are named as ``package.module:function``: the user's own, and those of registries."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from calibadv_jax.core.errors import UserError, one_line
from calibadv_jax.core.files import content_hash

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


# Both imports are cached, since every training step asks for them.
@functools.cache
def load_function(address: str) -> Callable[..., Any]:
    """Import a function of this project, named as ``package.module:function``."""
    module_name, _, name = address.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
    return function


@functools.cache
def import_user_function(
    address: str, key: str, parameters: tuple[str, ...], expected: str, keywords: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Import a function of the user's own.

    Args:
        address: ``package.module:function``.
        key: Config key that names the function, for messages.
        parameters: Names of the arguments that the function has to take, by position.
        expected: Signature of the function, for messages.
        keywords: Names of the arguments that the config gives it (`reward.args` and the like).

    Raises:
        UserError: The module cannot be imported or has no such function, or the function does not take the
            arguments.
    """
    module = _import_module(address, key)
    _, _, name = address.partition(":")
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(
            f"{key} is {address}, but {module.__name__} has no function {name}; expected: {expected}"
        )
    try:
        inspect.signature(function).bind(*parameters, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        arguments = [*parameters, *(f"{keyword}=…" for keyword in keywords)]
        raise UserError(
            f"{key} is {address}, but it cannot be called with ({', '.join(arguments)}): {error}; "
            f"expected: {expected}"
        ) from error
    return function


def _import_module(address: str, key: str) -> ModuleType:
    """Import the module of an address; UserError if it cannot be imported."""
    module_name, _, _ = address.partition(":")
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        advice = "correct it"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            # The module itself or one of its packages is missing, and not a module that it imports.
            advice = "PYTHONPATH must name the folder that holds it"
        raise UserError(
            f"{key} is {address}, but importing {module_name} failed: {describe_failure(error)}; {advice}"
        ) from error


def source_hash(addresses: list[str], key: str) -> str:
    """Hash the source code of functions of the user's own.

    Args:
        addresses: The functions, as ``package.module:function``.
        key: Config key that names them, for messages.

    Returns:
        SHA-256 over the files of their modules, and of the user's own modules that these import, directly or
        through others. Installed packages, Python's library and this package are left out, unless an address
        names them. Empty without a function, or if no module has a file.

    Raises:
        UserError: A module cannot be imported.
    """
    digests: dict[str, str] = {}
    for address in addresses:
        module = _import_module(address, key)
        _add_digests(module.__name__, digests)
    if not digests:
        return ""
    return content_hash(sorted(digests.items()))


def _add_digests(module_name: str, digests: dict[str, str]) -> None:
    """Add the digests of a loaded module and of the user's modules that it imports, by their names."""
    path = _module_file(module_name)
    if path is None or module_name in digests:
        return
    content = path.read_bytes()
    digests[module_name] = hashlib.sha256(content).hexdigest()
    if path.suffix != ".py":
        return
    for name in _imported_modules(content, sys.modules[module_name]):
        imported_path = _module_file(name)
        if imported_path is not None and not _is_foreign(imported_path):
            _add_digests(name, digests)


def _module_file(module_name: str) -> Path | None:
    """Return the file of a loaded module; None if it is not loaded, or has none."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if not file or not Path(file).is_file():
        return None
    return Path(file)


def _is_foreign(path: Path) -> bool:
    is_installed = "site-packages" in path.parts or "dist-packages" in path.parts
    return is_installed or str(path).startswith(_FOREIGN_CODE)


def _imported_modules(source: bytes, module: ModuleType) -> Iterator[str]:
    """Yield the names of the modules that a module's source may import, and of their packages."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative_name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative_name, module.__package__)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                yield ".".join(parts[:length])
