"""The question pipeline: grain, endless, shuffled again in every epoch, mixed by weights, resumable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question


class QuestionIterator:
    """Questions without end. The state counts questions: a resumed run may take another number a step.

    `weights`: data_source -> its share of the questions, in any unit, with epochs of its own; empty: every
    question once an epoch. A question whose mean score is below `rest_below` or above `rest_above` (1: none)
    is skipped once.
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
        self._rest_below, self._rest_above = rest_below, rest_above
        self._resting: set[str] = set()

    def _mixture(self, weights: Mapping[str, float], seed: int, shuffle: bool) -> grain.MapDataset:
        by_source: dict[str, list[int]] = {}
        for index, question in enumerate(self._questions):
            by_source.setdefault(question.data_source, []).append(index)
        check_questions(self._questions, weights)
        names = sorted(weights)
        # Each source has a seed of its own: equal ones would shuffle sources of one length alike.
        parts = [_endless(by_source[name], seed + number, shuffle) for number, name in enumerate(names)]
        return grain.MapDataset.mix(parts, [weights[name] for name in names])

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
    def resting(self) -> int:
        return len(self._resting)

    def note(self, question_id: str, scores: Sequence[float]) -> None:
        """Record the scores of a trained question's trajectories, as shares of the largest reward."""
        if scores:
            mean = math.fsum(max(0.0, score) for score in scores) / len(scores)
            if mean < self._rest_below or mean > self._rest_above and self._rest_above < 1:
                self._resting.add(question_id)

    def get_state(self) -> dict[str, Any]:
        """Return the number of drawn questions, and the ids that will be skipped, as JSON values."""
        return {"drawn": self._drawn} | ({"resting": sorted(self._resting)} if self._resting else {})

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called, with the same questions."""
        self._drawn, self._resting = state["drawn"], set(state.get("resting", []))


def check_questions(questions: Sequence[Question], weights: Mapping[str, float], template: str = "") -> None:
    """Refuse questions that do not fit data.weights (if any) and prompt.template with a UserError."""
    sources = {question.data_source for question in questions}
    if weights and sources != weights.keys():
        raise UserError(
            f"data.weights names {', '.join(sorted(weights))}, but data.train holds"
            f" {', '.join(sorted(sources))}: give each of them one weight"
        )
    bare = next((question for question in questions if not question.prompt), None)
    if template == "from_data" and bare:
        fault = "prompt.template is 'from_data', but its row has no 'prompt'"
        raise UserError(f"question {bare.id!r}: {fault}; choose another template")


def _endless(indices: Sequence[int], seed: int, shuffle: bool) -> grain.MapDataset:
    dataset = grain.MapDataset.source(indices).seed(seed)
    if shuffle:
        dataset = dataset.shuffle()
    return dataset.repeat()  # reshuffles: the shuffle's seed depends on the epoch
