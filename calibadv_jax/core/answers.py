"""Comparison of texts with golden answers, normalised as in SQuAD; yes and no have no special rule."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalise_answer(text: str) -> str:
    """Return a text in lower case without ASCII punctuation and English articles, with single spaces."""
    words = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split())


def holds_answer(text: str, golden_answers: Sequence[str]) -> bool:
    """Return whether a text contains the words of a golden answer, both normalised.

    An answer that normalises to nothing is contained in no text.
    """
    words = f" {normalise_answer(text)} "
    for golden_answer in golden_answers:
        golden_words = normalise_answer(golden_answer)
        if golden_words and f" {golden_words} " in words:
            return True
    return False
