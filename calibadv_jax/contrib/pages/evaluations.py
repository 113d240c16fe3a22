"""The evaluations of a run for the trajectory page: every question, before the training and after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calibadv_jax.contrib.pages.transcript import observation_parts
from calibadv_jax.core.errors import UserError
from calibadv_jax.evaluation.records import RowKey, ScoredRow, read_row_at, read_rows, row_key

_RIGHT_SHARE = 0.5  # of a question's trajectories that must match exactly, so that it counts as right


class _FileVersion(NamedTuple):
    """One version of a file; time and size tell it from the next version."""

    path: Path
    modified_ns: int  # nanoseconds
    size: int  # bytes


def evaluation_files(folder: Path) -> dict[str, Path]:
    """Return the files of answers in a run's folder by their names, such as "before" and "after".

    An evaluation before the training is the first one, one after it the last one, others stand between.
    """
    files = {}
    for path in folder.glob("evaluation*.jsonl"):
        name = path.stem.removeprefix("evaluation").strip("_-. ") or "evaluation"
        files[name] = path

    def place(name: str) -> tuple[int, str]:
        """Return what the names are sorted by."""
        if "before" in name:
            return 0, name
        return (2, name) if "after" in name else (1, name)

    return {name: files[name] for name in sorted(files, key=place)}


class Evaluations:
    """The evaluations in a run's folder.

    A file is read when its questions are asked for, and again if it has changed.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._versions: list[_FileVersion] = []  # of the files that were read
        self._index: dict[str, Any] = {}
        # For each question of the index, the position of its line in each file; None where it has none.
        self._offsets: list[list[int | None]] = []

    def names(self) -> list[str]:
        """Return the names of the evaluations; no file is read."""
        return list(evaluation_files(self.folder))

    def index(self) -> dict[str, Any]:
        """Return all questions with their scores, without transcripts, in JSON's types.

        Returns:
            ``names`` of the evaluations, and ``questions``: each with ``temperature``, ``source``, ``id``,
            ``question``, ``golden`` and ``results``, one for each evaluation; None where it lacks the
            question.

        Raises:
            UserError: A file is damaged.
        """
        files = evaluation_files(self.folder)
        versions = []
        for path in files.values():
            status = path.stat()
            versions.append(_FileVersion(path, status.st_mtime_ns, status.st_size))
        if not self._index or versions != self._versions:
            self._index, self._offsets = _read_index(files)
            self._versions = versions
        return self._index

    def question(self, number: int) -> dict[str, Any] | None:
        """Return a question with its transcripts; None where the index has fewer questions.

        Args:
            number: Place of the question in the index.

        Raises:
            UserError: A file is damaged, or has changed meanwhile.
        """
        index = self.index()
        if number >= len(index["questions"]):
            return None
        entry = index["questions"][number]
        answers: list[dict[str, Any] | None] = []
        for version, offset in zip(self._versions, self._offsets[number], strict=True):
            if offset is None:
                answers.append(None)
                continue
            row = read_row_at(version.path, offset)
            if row["id"] != entry["id"]:
                raise UserError(f"{version.path}: the file has changed; load the page again")
            trajectories = [_with_parts(trajectory) for trajectory in row["trajectories"]]
            answers.append({"scores": row["scores"], "trajectories": trajectories})
        return {**entry, "names": index["names"], "answers": answers}


def _read_index(files: dict[str, Path]) -> tuple[dict[str, Any], list[list[int | None]]]:
    """Return the index of all files, and the positions of each question's lines."""
    places: dict[RowKey, int] = {}
    questions: list[dict[str, Any]] = []
    offsets: list[list[int | None]] = []
    for number, path in enumerate(files.values()):
        for offset, row in read_rows(path, may_be_cut=True):
            key = row_key(row)
            if key not in places:
                places[key] = len(questions)
                questions.append(
                    {
                        "temperature": row["temperature"],
                        "source": row["data_source"],
                        "id": row["id"],
                        "question": row["question"],
                        "golden": row["golden_answers"],
                        "results": [None] * len(files),
                    }
                )
                offsets.append([None] * len(files))
            place = places[key]
            questions[place]["results"][number] = _result(row)
            offsets[place][number] = offset
    return {"names": list(files), "questions": questions}, offsets


def _with_parts(trajectory: ScoredRow) -> dict[str, Any]:
    """Return a copy of a trajectory whose turns have their observations in parts, a document each."""
    turns = [{**turn, "observation": observation_parts(turn["observation"])} for turn in trajectory["turns"]]
    return {**trajectory, "turns": turns}


def _result(row: ScoredRow) -> dict[str, Any]:
    """Return what the list of questions shows of an answer."""
    scores = row["scores"]
    return {
        "outcome": outcome(scores),
        "f1": _rounded(scores.get("f1")),
        "searches": _rounded(scores.get("searches")),
        "answer": _first_answer(row["trajectories"]),
    }


def outcome(scores: dict[str, float]) -> str:
    """Return "right", "partly", "wrong" or "failed" for the scores of a question."""
    if not scores:
        return "failed"
    if scores.get("em", 0.0) >= _RIGHT_SHARE:
        return "right"
    return "partly" if scores.get("f1", 0.0) > 0 else "wrong"


def _first_answer(trajectories: Sequence[ScoredRow]) -> str | None:
    for trajectory in trajectories:
        answer: str | None = trajectory["answer"]
        if answer is not None:
            return answer
    return None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
