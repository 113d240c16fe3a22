"""The order of the training questions: endless, shuffled in every epoch, mixed by weights, resumable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question


class QuestionIterator:
    """An iterator over the training questions that never ends.

    Its state is the number of questions that were drawn, so that a resumed run may take another number of
    questions per step.

    Args:
        questions: All training questions.
        seed: Seed of the order.
        shuffle: Whether to shuffle the questions in every epoch.
        weights: Share of each data_source in the questions, in any unit; each source then has epochs of its
            own. Empty or None: every question once an epoch.
        rest_below: A question whose mean score is lower is skipped once; 0: none.
        rest_above: A question whose mean score is higher is skipped once; 1: none.

    Raises:
        UserError: `weights` does not name exactly the data sources of the questions.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        seed: int,
        shuffle: bool,
        weights: Mapping[str, float] | None = None,
        rest_below: float = 0.0,
        rest_above: float = 1.0,
    ):
        self._questions = list(questions)
        if weights:
            self._indices = self._mixture(weights, seed, shuffle)
        else:
            self._indices = _endless(range(len(self._questions)), seed, shuffle)
        self._drawn = 0
        self._rest_below = rest_below
        self._rest_above = rest_above
        # Ids of the questions that will be skipped once.
        self._resting: set[str] = set()

    def _mixture(self, weights: Mapping[str, float], seed: int, shuffle: bool) -> grain.MapDataset:
        by_source: dict[str, list[int]] = {}
        for index, question in enumerate(self._questions):
            by_source.setdefault(question.data_source, []).append(index)
        check_questions(self._questions, weights)
        datasets = []
        shares = []
        for number, source in enumerate(sorted(weights)):
            # Each source has a seed of its own: equal seeds would shuffle sources of the same length alike.
            datasets.append(_endless(by_source[source], seed + number, shuffle))
            shares.append(weights[source])
        return grain.MapDataset.mix(datasets, shares)

    def __iter__(self) -> QuestionIterator:
        return self

    def __next__(self) -> Question:
        while True:
            question = self._questions[int(self._indices[self._drawn])]
            self._drawn += 1
            if question.id not in self._resting:
                return question
            self._resting.remove(question.id)

    @property
    def num_resting(self) -> int:
        """Number of questions that will be skipped once."""
        return len(self._resting)

    def record_scores(self, question_id: str, scores: Sequence[float]) -> None:
        """Record the scores of a question that was trained on, and skip it once if they are too low or high.

        Args:
            question_id: Id of the question.
            scores: Score of each trajectory, as a share of the largest reward; negative scores count as 0.
                Empty if all trajectories failed: the question is not skipped.
        """
        if not scores:
            return
        clipped_scores = [max(0.0, score) for score in scores]
        mean = math.fsum(clipped_scores) / len(scores)
        is_too_hard = mean < self._rest_below
        is_too_easy = self._rest_above < 1 and mean > self._rest_above
        if is_too_hard or is_too_easy:
            self._resting.add(question_id)

    def get_state(self) -> dict[str, Any]:
        """Return the number of drawn questions, and the ids that will be skipped, as JSON values."""
        state: dict[str, Any] = {"drawn": self._drawn}
        if self._resting:
            state["resting"] = sorted(self._resting)
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called, with the same questions."""
        self._drawn = state["drawn"]
        self._resting = set(state.get("resting", []))


def check_questions(questions: Sequence[Question], weights: Mapping[str, float], template: str = "") -> None:
    """Refuse questions that do not fit the config.

    Args:
        questions: All training questions.
        weights: data.weights; empty: the data sources are not checked.
        template: prompt.template.

    Raises:
        UserError: `weights` does not name exactly the data sources of the questions, or the template is
            "from_data" and a question has no prompt.
    """
    sources = {question.data_source for question in questions}
    if weights and sources != weights.keys():
        raise UserError(
            f"data.weights names {', '.join(sorted(weights))}, but data.train holds "
            f"{', '.join(sorted(sources))}: give each of them one weight"
        )
    if template != "from_data":
        return
    for question in questions:
        if not question.prompt:
            raise UserError(
                f"question {question.id!r}: prompt.template is 'from_data', but its row has no 'prompt'; "
                "choose another template"
            )


def _endless(indices: Sequence[int], seed: int, shuffle: bool) -> grain.MapDataset:
    """Return the indices repeated without end, in another order in every epoch if `shuffle` is set."""
    dataset = grain.MapDataset.source(indices).seed(seed)
    if shuffle:
        dataset = dataset.shuffle()
    # The seed of grain's shuffle depends on the epoch, so that repeat() shuffles again.
    return dataset.repeat()
