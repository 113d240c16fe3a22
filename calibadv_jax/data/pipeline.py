"""The question pipeline: grain, endless, shuffled again in every epoch, resumable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain

from calibadv_jax.trajectory import Question


class QuestionIterator:
    """Questions one by one, without end; `get_state` and `set_state` carry its position as plain JSON values.

    The position counts questions, so that a resumed run may take another number of them a step.
    """

    def __init__(self, questions: Sequence[Question], seed: int, shuffle: bool):
        self._questions = list(questions)
        indices = grain.MapDataset.range(len(self._questions)).seed(seed)
        if shuffle:
            indices = indices.shuffle()
        self._indices = indices.repeat()  # repeat reshuffles: the shuffle's seed depends on the epoch
        self._drawn = 0

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
