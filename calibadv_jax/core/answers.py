"""Comparison of texts with golden answers, normalised as in SQuAD; yes and no have no special rule."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalise_answer(text: str) -> str:
    """Return lower case without ASCII punctuation and English articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def holds_answer(text: str, golden_answers: Sequence[str]) -> bool:
    """Whether the words of a golden answer stand in a text, both normalised; an empty answer never does."""
    words = f" {normalise_answer(text)} "
    return any(golden and f" {golden} " in words for golden in map(normalise_answer, golden_answers))
