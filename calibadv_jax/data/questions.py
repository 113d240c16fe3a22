"""Question files: JSON Lines with id, question, golden_answers, data_source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.errors import UserError
from calibadv_jax.protocol import well_formed
from calibadv_jax.trajectory import Question


def read_jsonl(path: str | Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file:line", row) for every line that is not blank.

    Raises:
        UserError: no such file, or a line that is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file of {what}")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not valid JSON ({error.msg}); each line is one object") from error
            if not isinstance(row, dict):
                raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield where, row


def load_questions(path: str | Path) -> list[Question]:
    """Reads a question file.

    Raises:
        UserError: missing file, malformed row, no golden answer, an id used twice; with file and line.
    """
    if not str(path):
        raise UserError("no question file: set data.train and data.eval")
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for where, row in read_jsonl(path, "questions"):
        question = parse_question(row, where)
        if question.id in seen:
            raise UserError(f"{where}: id {question.id!r} was used before, at {seen[question.id]}")
        seen[question.id] = where
        questions.append(question)
    if not questions:
        raise UserError(f"{path}: no questions in it")
    return questions


def parse_question(row: dict[str, Any], where: str) -> Question:
    """One row as a Question; `where` names it in errors."""
    if type(row.get("id")) is int:  # as in many published files
        row = row | {"id": str(row["id"])}
    for name in ("id", "question", "data_source"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise UserError(f"{where}: field {name!r} must be a non-empty string, got {row.get(name)!r}")
    answers = row.get("golden_answers")
    if not isinstance(answers, list) or not answers:
        raise UserError(f"{where}: field 'golden_answers' must be a non-empty list, got {answers!r}")
    if not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise UserError(f"{where}: every one of 'golden_answers' must be a non-empty string, got {answers!r}")
    supporting = row.get("supporting_ids", [])
    if not isinstance(supporting, list):
        raise UserError(f"{where}: field 'supporting_ids' must be a list, got {supporting!r}")
    return Question(
        well_formed(row["id"]),
        well_formed(row["question"]),
        tuple(map(well_formed, answers)),
        well_formed(row["data_source"]),
        tuple(map(str, supporting)),
    )


def write_questions(path: Path, questions: Iterable[Question]) -> None:
    """Writes a file that `load_questions` reads."""
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            row = {
                "id": question.id,
                "question": question.text,
                "golden_answers": list(question.golden_answers),
                "data_source": question.data_source,
                "supporting_ids": list(question.supporting_ids),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def select_evenly(questions: Sequence[Question], limit: int, seed: int) -> list[Question]:
    """At most `limit` questions, taken in turn from every data source; the order of the file is kept."""
    rng = np.random.default_rng(seed)
    by_source: dict[str, list[int]] = {}
    for index in rng.permutation(len(questions)).tolist():
        by_source.setdefault(questions[index].data_source, []).append(index)
    chosen: list[int] = []
    for rank in range(len(questions)):
        chosen += [indices[rank] for _, indices in sorted(by_source.items()) if rank < len(indices)]
        if len(chosen) >= limit:
            break
    return [questions[index] for index in sorted(chosen[:limit])]
