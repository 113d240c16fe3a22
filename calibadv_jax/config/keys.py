"""The names of all keys, and what somebody may have meant by another name."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from calibadv_jax.config.root import Config


def known_keys(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every key -> its type, sections included."""
    keys: dict[str, Any] = {}
    if is_pydantic_dataclass(section):
        for name, field in section.__pydantic_fields__.items():
            kind = field.annotation
            keys[prefix + name] = kind
            if isinstance(kind, type):
                keys |= known_keys(kind, f"{prefix}{name}.")
    return keys


def nearest(dotted: str) -> str | None:
    """The known key that an unknown one was probably meant to be."""
    keys = known_keys()
    near = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.5) or [
        key for key in keys if key.rsplit(".", 1)[-1] == dotted.rsplit(".", 1)[-1]
    ]
    return near[0] if near else None
