"""Secrets in environment variables that a config refers to; messages show the variable's name instead."""

from __future__ import annotations

import re

# Characters of the shortest value that counts as a secret.
SHORTEST = 4
# Names of variables that hold secrets.
KEY_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH", re.IGNORECASE)
# Values that look like a key: no word, number or path.
KEY_VALUE = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[^\s/]{16,}")

# Secret value -> reference to its variable.
_references: dict[str, str] = {}


def remember(name: str, value: str) -> None:
    """Make `redact` replace the value of an environment variable, if it looks like a secret.

    Args:
        name: Name of the variable.
        value: Value of the variable. Either its own form or the variable's name may be that of a secret.
    """
    can_be_secret = len(value) >= SHORTEST and not value.isdecimal()
    is_named_as_secret = KEY_NAME.search(name) and can_be_secret
    if is_named_as_secret or KEY_VALUE.fullmatch(value):
        _references[value] = f"${{oc.env:{name}}}"


def redact(text: str) -> str:
    """Return a text with references in place of all secrets that `remember` was given."""
    # Longer values first: a value may be part of another.
    for value in sorted(_references, key=len, reverse=True):
        text = text.replace(value, _references[value])
    return text
