"""The silver document set of a group, and how correct each search turn is by it (CalibAdv)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from calibadv_jax.core.trajectory import Group, Trajectory

# Weights of a turn's good documents (at least one), number of all its documents -> correctness.
_CORRECTNESS: dict[str, Callable[[Sequence[float], int], float]] = {
    "fraction": lambda weights, num_documents: len(weights) / num_documents,
    "max": lambda weights, num_documents: max(weights),
    "mean": lambda weights, num_documents: sum(weights) / num_documents,
}
_MAX_SHARED_DOCUMENTS = 1


@dataclass(frozen=True)
class Judgement:
    """The correctness of a turn by its group's silver documents, and its reason."""

    correctness: float = 0.0  # in [0, 1]
    repeated: str | None = None  # what it repeats: "think of turn 1" or "documents of turn 2", counted from 1
    found_silver: tuple[str, ...] = ()  # ids of its silver documents that no earlier turn saw, in its order


def silver_documents(group: Group, threshold: float) -> dict[str, float]:
    """Return document id -> weight in (0, 1] of the documents that the group's best trajectories saw.

    Best: format valid, relative score >= `threshold` and score equal to the group's maximum. A document's
    weight is the number of best trajectories that saw it over the largest such number. Empty where no
    trajectory is good enough, or where none of the best saw a document.
    """
    best = max(group.trajectories, key=lambda trajectory: trajectory.answer_score, default=None)
    if best is None or best.relative_score < threshold:
        return {}
    counts: Counter[str] = Counter()
    for trajectory in group.trajectories:
        if trajectory.format_valid and trajectory.answer_score == best.answer_score:
            ids = (document.id for turn in trajectory.turns for document in turn.documents)
            counts.update(dict.fromkeys(ids, 1))
    largest = max(counts.values(), default=1)
    return {document: count / largest for document, count in counts.items()}


def judge_turns(trajectory: Trajectory, silver: dict[str, float], how: str) -> list[Judgement]:
    """Judge each turn, length K; the judgement of a turn that is no action is empty.

    What holds for a search holds for every action; one that brings no documents is worth 0. A search turn's
    good documents are silver and not seen before in the trajectory. It is worth 0 without any, or if it
    repeats an earlier turn: its think is more than half the same words in edit distance, or it shares two or
    more distinct documents. Nothing is judged in a format-invalid trajectory, nor without silver documents.
    `how` is fraction, max or mean; see AdvantageConfig.correctness.
    """
    judgements = [Judgement() for _ in trajectory.turns]
    if not silver or not trajectory.format_valid:
        return judgements
    score = _CORRECTNESS[how]
    earlier_thinks: list[list[str]] = []
    earlier_documents: list[set[str]] = []
    for index, turn in enumerate(trajectory.turns):
        words = turn.think.split()
        documents = dict.fromkeys(document.id for document in turn.documents)  # a set in the order shown
        if turn.is_action:
            seen = set().union(*earlier_documents)
            good = tuple(document for document in documents if document in silver and document not in seen)
            repeated = _repeated(words, set(documents), earlier_thinks, earlier_documents)
            correctness = 0.0
            if good and repeated is None:
                correctness = score([silver[document] for document in good], len(turn.documents))
            judgements[index] = Judgement(correctness, repeated, good)
        earlier_thinks.append(words)
        earlier_documents.append(set(documents))
    return judgements


def _repeated(
    words: Sequence[str],
    documents: set[str],
    earlier_thinks: Sequence[Sequence[str]],
    earlier_documents: Sequence[set[str]],
) -> str | None:
    """Name the first earlier turn that a turn repeats, documents before thinks; None if there is none."""
    for number, shown in enumerate(earlier_documents, 1):
        if len(documents & shown) > _MAX_SHARED_DOCUMENTS:
            return f"documents of turn {number}"
    for number, think in enumerate(earlier_thinks, 1):
        if is_repetition(words, think):
            return f"think of turn {number}"
    return None


def is_repetition(words: Sequence[str], earlier: Sequence[str]) -> bool:
    """Return whether 1 - edit distance / longer length > 0.5, in words; two empty texts are no repetition."""
    limit = (max(len(words), len(earlier)) - 1) // 2  # the largest distance below half of the longer length
    return limit >= 0 and Levenshtein.distance(words, earlier, score_cutoff=limit) <= limit
