"""Packages that a test needs, looked for without their import: torch alone takes seconds."""

from importlib.util import find_spec

import pytest


def need(*names: str) -> None:
    """Skips the module that asks at its top where one is not installed."""
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"needs the package {name}", allow_module_level=True)
