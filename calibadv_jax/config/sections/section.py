"""What all sections share: pydantic's settings, rules between keys, marks, and the check of URLs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

# Unknown keys, nan and inf are refused; the text under a field is its description (docs/configuration.md).
SECTION = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

# A user or a password before the first slash of a URL, or a password with a slash in the place of the port.
_CREDENTIALS = re.compile(r"(?:[a-z+.-]*:)?/*(?:[^/?#]*@|[^/?#:\[]*:(?!\d*(?:[/?#]|$))[^@]*@)", re.IGNORECASE)


@dataclass(frozen=True, config=SECTION)
class Section:
    """A section with rules between its keys.

    Raises:
        pydantic.ValidationError: A rule is broken; the message is the first of `_faults`.
    """

    def _faults(self) -> Iterator[str]:
        """Yield a message for each rule that is broken: the values, and how to correct them."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_faults(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self


def credential_faults(key: str, urls: str | list[str], token_variable: str = "") -> Iterator[str]:
    """Yield a fault if a URL holds a user or a password, which the run's folder would then hold too.

    Args:
        key: Key of the URLs, for the message.
        urls: A URL, or several.
        token_variable: Environment variable to set instead; empty if the service takes no token.
    """
    urls = [urls] if isinstance(urls, str) else urls
    if not any(_CREDENTIALS.match(url) for url in urls):
        return
    advice = "take them out"
    if token_variable:
        advice += f", and set the environment variable {token_variable} to a token"
    yield f"{key} holds a user or a password, which messages and logs would show; {advice}"


def normal_url(url: str) -> str:
    """Return a URL in the form that all spellings of the same address share.

    Scheme and host are in lower case; the default port and slashes at the end are left out.

    Args:
        url: A URL; a text that is none is only stripped of slashes at its end.
    """
    stripped = url.strip().rstrip("/")
    try:
        parts = urlsplit(stripped)
        port = parts.port
    except ValueError:
        return stripped
    if not parts.hostname:
        return stripped
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    is_default = port is None or port == {"http": 80, "https": 443}.get(parts.scheme)
    place = host if is_default else f"{host}:{port}"
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/"), parts.query, ""))


class Mark(Enum):
    """Role of a key: what depends on its value. `keys.keys_with_mark` lists the keys of a mark.

    A mark at the field of a section holds for all keys of the section.
    """

    # Learning does not depend on the key: a resumed run may have another value.
    UNLEARNED = auto()
    # Learning depends on the key, although its section is UNLEARNED.
    LEARNED = auto()
    # The cold start depends on the key.
    COLD_START = auto()
    # Two runs of one experiment may have different values: seeds, paths, logging.
    PER_RUN = auto()
    # No answer of an evaluation depends on the key.
    NO_ANSWER = auto()
    # A command writes to this path. It follows run.dir, and is never inside another run's folder.
    OUTPUT = auto()
    # The key is a path or address: the model card shows its last part, or nothing.
    PLACE = auto()
