"""Secrets of the environment that a config refers to: messages name the variable instead."""

from __future__ import annotations

import re

SHORTEST = 4  # characters
KEY_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH", re.IGNORECASE)
KEY_VALUE = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[^\s/]{16,}")  # no word, number or path

_references: dict[str, str] = {}  # value -> reference to its variable


def remember(name: str, value: str) -> None:
    """Let `redact` replace the value of an environment variable, if its name or form is that of a secret."""
    is_secret = KEY_NAME.search(name) and len(value) >= SHORTEST and not value.isdecimal()
    if is_secret or KEY_VALUE.fullmatch(value):
        _references[value] = f"${{oc.env:{name}}}"


def redact(text: str) -> str:
    """Replace the values that were remembered by references."""
    for value in sorted(_references, key=len, reverse=True):  # a value may be part of another
        text = text.replace(value, _references[value])
    return text
