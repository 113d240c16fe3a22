"""How texts are compared with golden answers.

Normalisation is the one customary in open-domain question answering (SQuAD): lower case, no ASCII
punctuation, no English articles, single spaces. There is no special rule for yes/no answers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalise_answer(text: str) -> str:
    """Lower case, ASCII punctuation and articles dropped, runs of whitespace squeezed to one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def holds_answer(text: str, golden_answers: Sequence[str]) -> bool:
    """Whether the words of a golden answer stand in a text, both normalised; one without words never does."""
    words = f" {normalise_answer(text)} "
    return any(golden and f" {golden} " in words for golden in map(normalise_answer, golden_answers))
