"""Answers: where one stands in a message, and comparison of texts with golden answers.

Texts are normalised as in SQuAD; yes and no have no special rule.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_OPEN_ANSWER = "<answer>"
_CLOSE_ANSWER = "</answer>"
_BOX = "\\boxed{"
# What is missing in a message whose answer stands in a place of its own.
MISSING_ANSWER = {
    "tag": "the answer must stand between <answer> and </answer>",
    "whole": "the message is empty",
    "box": "the answer must stand in \\boxed{}",
}


def extract_answer(message: str, answer_from: str) -> str | None:
    """Return the answer of a message.

    Args:
        message: A message of the policy without its thought.
        answer_from: "whole": the message; "tag": what stands between the first <answer> and its end; "box":
            what stands in the last LaTeX box, whose brackets must be balanced.

    Returns:
        The stripped answer; None if its place is missing, or a whole message is empty.
    """
    if answer_from == "whole":
        return message.strip() or None
    if answer_from == "tag":
        _, opened, rest = message.partition(_OPEN_ANSWER)
        answer, closed, _ = rest.partition(_CLOSE_ANSWER)
        return answer.strip() if opened and closed else None
    start = message.rfind(_BOX)
    if start < 0:
        return None
    return _inside_bracket(message[start + len(_BOX) :])


def _inside_bracket(text: str) -> str | None:
    """Return the stripped text before the curly bracket that closes an open one; None if none does."""
    depth = 1
    for index, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return text[:index].strip()
    return None


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
