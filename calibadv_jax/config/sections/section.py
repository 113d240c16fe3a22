"""What all sections share: pydantic's settings, rules between keys, marks, and the check of URLs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import Self

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

# Unknown keys, nan and inf are refused; the text under a field is its description (docs/configuration.md).
SECTION = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

# Before the first slash, or a password that holds a slash where the port would be.
_CREDENTIALS = re.compile(r"(?:[a-z+.-]*:)?/*(?:[^/?#]*@|[^/?#:\[]*:(?!\d*(?:[/?#]|$))[^@]*@)", re.IGNORECASE)


@dataclass(frozen=True, config=SECTION)
class Section:
    """A section with rules between its keys; the first fault is refused with a ValueError."""

    def _faults(self) -> Iterator[str]:
        """Yield what cannot work, and the way out."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_faults(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self


def credential_faults(key: str, urls: str | list[str], token_variable: str = "") -> Iterator[str]:
    """Refuse URLs with a user or a password, which would stand in the run's folder."""
    token = f", and set the environment variable {token_variable} to a token" if token_variable else ""
    urls = [urls] if isinstance(urls, str) else urls
    if any(_CREDENTIALS.match(url) for url in urls):
        yield f"{key} holds a user or a password, which messages and logs would show; take them out{token}"


class Mark(Enum):
    """Role of a key, at its field, or at a section's field for all keys of the section; see `keys.marked`."""

    UNLEARNED = auto()  # learning does not depend on it: a resumed run may have another value
    LEARNED = auto()  # in a section that is UNLEARNED: learning depends on this key
    TUNED = auto()  # people change it in the middle of a run on purpose
    COLD_START = auto()  # the cold start depends on it
    PER_RUN = auto()  # two runs of one experiment may have different values: seeds, places, logging
    NO_ANSWER = auto()  # no answer of an evaluation depends on it
    OUTPUT = auto()  # a command writes there: it follows run.dir, and lies in no other run's folder
    PLACE = auto()  # a path or address: the model card has its last part, or nothing
