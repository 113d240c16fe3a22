"""The question pipeline: grain, endless, shuffled anew in every epoch, resumable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from calibadv_jax.errors import UserError
from calibadv_jax.trajectory import Question


class QuestionIterator:
    """Batches of questions; `get_state` and `set_state` carry its position as plain JSON values."""

    def __init__(self, questions: Sequence[Question], batch_size: int, seed: int, shuffle: bool):
        import grain

        self._questions = list(questions)
        indices = grain.MapDataset.range(len(self._questions)).seed(seed)
        if shuffle:
            indices = indices.shuffle()
        # repeat reshuffles: the shuffle's seed depends on the epoch
        dataset = indices.repeat().batch(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=0))
        self._iterator = iter(dataset)

    def __iter__(self) -> QuestionIterator:
        return self

    def __next__(self) -> list[Question]:
        return [self._questions[int(index)] for index in next(self._iterator)]

    def get_state(self) -> dict[str, Any]:
        """Position and identity of the questions."""
        return {
            "iterator": json.loads(json.dumps(self._iterator.get_state())),
            "num_questions": len(self._questions),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `get_state` was called.

        Raises:
            UserError: the question file has changed its size since.
        """
        if state["num_questions"] != len(self._questions):
            raise UserError(
                f"data.train has {len(self._questions)} questions, but the checkpoint was written with"
                f" {state['num_questions']}; restore the file, or start anew with checkpoint.resume=false"
            )
        self._iterator.set_state(state["iterator"])


def question_iterator(
    questions: Sequence[Question], batch_size: int, seed: int, shuffle: bool
) -> QuestionIterator:
    """Endless batches of `batch_size` questions; a batch may span two epochs."""
    return QuestionIterator(questions, batch_size, seed, shuffle)
