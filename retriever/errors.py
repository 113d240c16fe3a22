"""The service's own error type; it shares nothing with the trainer."""

from __future__ import annotations

import importlib
from typing import Any


class RetrieverError(Exception):
    """One line that names the file, option or value, and the way out."""


def require(module: str, advice: str) -> Any:
    """An optional package's module.

    Args:
        advice: what to install, or which option not to use.

    Raises:
        RetrieverError: it, or something that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RetrieverError(f"{error.name or module} is not installed: {advice}") from error
