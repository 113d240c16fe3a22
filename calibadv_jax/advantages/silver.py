"""The silver document set of a group, and how correct each search turn is by it (CalibAdv)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from rapidfuzz.distance import Levenshtein

from calibadv_jax.trajectory import Group, Trajectory

# Weights of a turn's good documents (at least one), number of all its documents -> correctness.
_CORRECTNESS: dict[str, Callable[[Sequence[float], int], float]] = {
    "fraction": lambda weights, num_documents: len(weights) / num_documents,
    "max": lambda weights, num_documents: max(weights),
    "mean": lambda weights, num_documents: sum(weights) / num_documents,
}
_MAX_SHARED_DOCUMENTS = 1


def silver_documents(group: Group, threshold: float) -> dict[str, float]:
    """Document id -> weight in (0, 1] of the documents that the group's best trajectories saw.

    Best: format valid, score >= `threshold` and equal to the group's maximum. A document's weight is
    the number of best trajectories that saw it over the largest such number. Empty where no trajectory
    is good enough, or where none of the best saw a document.
    """
    best_score = max((trajectory.answer_score for trajectory in group.trajectories), default=0.0)
    if best_score < threshold:
        return {}
    counts: Counter[str] = Counter()
    for trajectory in group.trajectories:
        if trajectory.format_valid and trajectory.answer_score == best_score:
            ids = (document.id for turn in trajectory.turns for document in turn.documents)
            counts.update(dict.fromkeys(ids, 1))
    largest = max(counts.values(), default=1)
    return {document: count / largest for document, count in counts.items()}


def turn_correctness(trajectory: Trajectory, silver: dict[str, float], how: str) -> np.ndarray:
    """float64 [K]: correctness in [0, 1] of each turn; 0 for turns that are not searches.

    A search turn's good documents are silver and not seen before in the trajectory. It is worth 0
    without any, or if it repeats an earlier turn: its think is more than half the same words in edit
    distance, or it shares two or more distinct documents. Format-invalid trajectories are worth 0
    throughout. `how` is fraction, max or mean; see AdvantageConfig.correctness.
    """
    correctness = np.zeros(len(trajectory.turns))
    if not silver or not trajectory.format_valid:
        return correctness
    score = _CORRECTNESS[how]
    earlier_thinks: list[list[str]] = []
    earlier_documents: list[set[str]] = []
    for index, turn in enumerate(trajectory.turns):
        words = turn.think.split()
        documents = dict.fromkeys(document.id for document in turn.documents)  # a set in the order shown
        if turn.kind == "search":
            seen = set().union(*earlier_documents)
            good = [silver[document] for document in documents if document in silver and document not in seen]
            repeats = any(
                len(documents.keys() & shown) > _MAX_SHARED_DOCUMENTS for shown in earlier_documents
            ) or any(is_repetition(words, think) for think in earlier_thinks)
            if good and not repeats:
                correctness[index] = score(good, len(turn.documents))
        earlier_thinks.append(words)
        earlier_documents.append(set(documents))
    return correctness


def is_repetition(words: Sequence[str], earlier: Sequence[str]) -> bool:
    """Whether 1 - edit distance / longer length > 0.5, in words; two empty texts are no repetition."""
    limit = (max(len(words), len(earlier)) - 1) // 2  # the largest distance below half of the longer length
    return limit >= 0 and Levenshtein.distance(words, earlier, score_cutoff=limit) <= limit
