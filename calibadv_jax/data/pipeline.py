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
        rest_below: A question whose mean score is lower may rest; 0: none.
        rest_above: A question whose mean score is higher may rest; 1: none.
        rest_after: Number of times in a row that a question must have such a score before it rests.
        rest_for: Number of times that a resting question is then skipped. After that it is asked again, and
            one more such score lets it rest again.
        rest_share: Largest share of the questions that may rest at the same time.

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
        rest_after: int = 1,
        rest_for: int = 1,
        rest_share: float = 1.0,
    ):
        self._questions = list(questions)
        if weights:
            self._indices = self._mixture(weights, seed, shuffle)
        else:
            self._indices = _endless(range(len(self._questions)), seed, shuffle)
        self._drawn = 0
        self._rest_below = rest_below
        self._rest_above = rest_above
        self._rest_after = rest_after
        self._rest_for = rest_for
        self._max_resting = int(rest_share * len(self._questions))
        # Id of a resting question -> number of times that it will still be skipped.
        self._resting: dict[str, int] = {}
        # Id of a question -> number of its latest mean scores, in a row, that were too low or too high. It is
        # not used where a single such score is enough.
        self._streaks: dict[str, int] = {}

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
            self._resting[question.id] -= 1
            if not self._resting[question.id]:
                del self._resting[question.id]

    @property
    def num_resting(self) -> int:
        """Number of questions that will be skipped the next time."""
        return len(self._resting)

    def record_scores(self, question_id: str, scores: Sequence[float]) -> None:
        """Record the scores of a question that was trained on, and let it rest if they are too low or high.

        Args:
            question_id: Id of the question.
            scores: Score of each trajectory, as a share of the largest reward; negative scores count as 0.
                Empty if all trajectories failed: nothing is recorded.
        """
        if not scores:
            return
        clipped_scores = [max(0.0, score) for score in scores]
        mean = math.fsum(clipped_scores) / len(scores)
        is_too_hard = mean < self._rest_below
        is_too_easy = self._rest_above < 1 and mean > self._rest_above
        if not is_too_hard and not is_too_easy:
            self._streaks.pop(question_id, None)
            return
        streak = min(self._rest_after, self._streaks.get(question_id, 0) + 1)
        if self._rest_after > 1:
            self._streaks[question_id] = streak
        has_room = len(self._resting) < self._max_resting
        if streak == self._rest_after and (has_room or question_id in self._resting):
            self._resting[question_id] = self._rest_for

    def get_state(self) -> dict[str, Any]:
        """Return the number of drawn questions and what is known of the curriculum, as JSON values."""
        state: dict[str, Any] = {"drawn": self._drawn}
        if self._resting:
            state["resting"] = dict(sorted(self._resting.items()))
        if self._streaks:
            state["streaks"] = dict(sorted(self._streaks.items()))
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called, with the same questions."""
        self._drawn = state["drawn"]
        resting = state.get("resting", {})
        if isinstance(resting, list):  # of an earlier version, which skipped each question once
            resting = dict.fromkeys(resting, 1)
        self._resting = dict(resting)
        self._streaks = dict(state.get("streaks", {}))


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
