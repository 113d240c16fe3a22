"""The question pipeline: grain, endless, shuffled again in every epoch, mixed by weights, resumable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question


class QuestionIterator:
    """Questions one by one, without end; `get_state` and `set_state` carry its position as plain JSON values.

    The position counts questions, so that a resumed run may take another number of them a step.

    Args:
        weights: data_source -> its share of the questions, in any unit; empty: every question once an
            epoch. With weights every source has epochs of its own.

    Raises:
        UserError: a weight for a data source that no question has, or a data source without weight.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        seed: int,
        shuffle: bool,
        weights: Mapping[str, float] | None = None,
    ):
        self._questions = list(questions)
        if weights:
            self._indices = self._mixture(weights, seed, shuffle)
        else:
            self._indices = _endless(range(len(self._questions)), seed, shuffle)
        self._drawn = 0

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
        index = int(self._indices[self._drawn])
        self._drawn += 1
        return self._questions[index]

    def get_state(self) -> dict[str, Any]:
        """How many questions were drawn."""
        return {"drawn": self._drawn}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `get_state` was called, whose questions must be the same ones."""
        self._drawn = state["drawn"]


def check_questions(questions: Sequence[Question], weights: Mapping[str, float], template: str = "") -> None:
    """Whether the questions are those that the config speaks of; known before anything is started.

    Args:
        weights: of data.weights; empty: not checked.
        template: prompt.template.

    Raises:
        UserError: as `QuestionIterator`, or a question without the prompt that the template takes.
    """
    sources = {question.data_source for question in questions}
    if weights and sources != weights.keys():
        raise UserError(
            f"data.weights names {', '.join(sorted(weights))}, but data.train holds"
            f" {', '.join(sorted(sources))}: give each of them one weight"
        )
    bare = next((question for question in questions if not question.prompt), None)
    if template == "from_data" and bare:
        raise UserError(
            f"question {bare.id!r}: prompt.template is 'from_data', but its row has no 'prompt'; choose"
            " another template"
        )


def _endless(indices: Sequence[int], seed: int, shuffle: bool) -> grain.MapDataset:
    dataset = grain.MapDataset.source(indices).seed(seed)
    if shuffle:
        dataset = dataset.shuffle()
    return dataset.repeat()  # reshuffles: the shuffle's seed depends on the epoch
