"""Answer scores against several golden answers: exact match, token F1, cover exact match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from calibadv_jax.core.answers import normalise_answer


def _normalised_golden(golden_answers: Sequence[str]) -> list[str]:
    if not golden_answers:
        raise ValueError("a prediction cannot be scored without golden answers")
    return [normalise_answer(golden) for golden in golden_answers]


def exact_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """1.0 if the normalised prediction equals any normalised golden answer, else 0.0.

    Raises:
        ValueError: `golden_answers` is empty.
    """
    return float(normalise_answer(prediction) in _normalised_golden(golden_answers))


def cover_em(prediction: str, golden_answers: Sequence[str]) -> float:
    """1.0 if any normalised golden answer is a substring of the normalised prediction, else 0.0.

    A golden answer that normalises to nothing ("The") covers every prediction, as upstream.

    Raises:
        ValueError: `golden_answers` is empty.
    """
    normalised = normalise_answer(prediction)
    return float(any(golden in normalised for golden in _normalised_golden(golden_answers)))


def f1(prediction: str, golden_answers: Sequence[str]) -> float:
    """Best F1 in [0, 1] between the words of the prediction and those of one golden answer.

    Computed as 2·common / (predicted + golden words): one rounding, so that equal fractions are equal
    doubles, which the precision/recall form does not give. Two empty answers score 0.

    Raises:
        ValueError: `golden_answers` is empty.
    """
    words = Counter(normalise_answer(prediction).split())
    best = 0.0
    for golden in _normalised_golden(golden_answers):
        golden_words = Counter(golden.split())
        common = (words & golden_words).total()
        if common:
            best = max(best, 2 * common / (words.total() + golden_words.total()))
    return best


# Name, as in reward.answer and the metric reward/NAME -> score of (prediction, golden answers), in [0, 1].
ANSWER_REWARDS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": f1,
    "cover_em": cover_em,
}
