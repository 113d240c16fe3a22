"""Read questions from files of any supported layout, write them in ours, choose them evenly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.answers import normalise_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.core.tags import well_formed
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data.files import Sources, find_files, read_rows
from calibadv_jax.data.layouts import NO_COLUMNS, OURS, Fields, Layout, NoAnswer, layout_of, without_nan

ROLES = ("system", "user", "assistant")
_message = lru_cache(maxsize=1024)(Message)  # nearly all rows share a prompt: kept once
_JOINED = re.compile(r"\S(?:\s*[|;\n]+\s*| / )\S")


def load_questions(sources: Sources, columns: ColumnsConfig = NO_COLUMNS) -> list[Question]:
    """Return the questions of files in any layout, in order; UserError for a bad row or a repeated id."""
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for path, source in find_files(sources):
        before = len(questions)
        for where, question in read_questions(path, source, columns):
            if isinstance(question, NoAnswer):
                raise question
            if question.id in seen:
                fault = f"{where}: id {question.id!r} was used before, at {seen[question.id]}"
                raise UserError(f"{fault}; correct or remove the row (calibadv prepare-data does)")
            seen[question.id] = where
            questions.append(question)
        if len(questions) == before:
            raise UserError(f"{path}: no questions in it; correct data.train or data.eval")
    return questions


def read_questions(
    path: Path, source: str, columns: ColumnsConfig = NO_COLUMNS
) -> Iterator[tuple[str, Question | NoAnswer]]:
    """Yield (place, question or `NoAnswer`) of every row. The first row decides the layout.

    Rows in our layout with id and data_source keep the id. Others get the id ``DATA_SOURCE_ID``, since ids of
    published files repeat in other data sets; without an id, the file's name and the place in it. `source` is
    the data_source of rows that name none.
    """
    layout: Layout | None = None
    for number, (where, row) in enumerate(read_rows(path)):
        row = {key: without_nan(value) for key, value in row.items()}
        layout = layout or layout_of(row, where, columns)
        try:
            fields = _read(layout, row, where, source, f"{path.name.partition('.')[0]}_{number}")
            if columns.separator:
                parts = (part.strip() for text in fields.answers for part in text.split(columns.separator))
                fields = replace(fields, answers=list(dict.fromkeys(filter(None, parts))) or fields.answers)
            yield where, _question(fields, where)
        except NoAnswer as reason:
            reason.source = well_formed(str(row.get("data_source") or layout.source or source))
            yield where, reason
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            fault = f"a value is not what {layout.name} has there ({type(error).__name__}: {error})"
            raise UserError(f"{where}: {fault}; correct the row") from error


def _read(layout: Layout, row: dict[str, Any], where: str, source: str, place: str) -> Fields:
    fields = layout.read(row, where)
    if layout is OURS and fields.id is not None and fields.data_source:
        return fields
    source = fields.data_source or layout.source or source
    name = place if fields.id is None else fields.id
    if type(name) in (str, int) and not str(name).startswith(f"{source}_"):
        name = f"{source}_{name}"
    question = fields.question.strip() if isinstance(fields.question, str) else fields.question
    return replace(fields, id=name, question=question, data_source=source)


def parse_question(row: dict[str, Any], where: str) -> Question:
    """Return the question of a row in our layout; NoAnswer without a golden answer, else UserError."""
    row = {key: without_nan(value) for key, value in row.items()}
    return _question(OURS.read(row, where), where)


def _question(fields: Fields, where: str) -> Question:
    name = str(fields.id) if type(fields.id) is int else fields.id  # as in many published files
    values = {"id": name, "question": fields.question, "data_source": fields.data_source}
    for key, value in values.items():
        if not isinstance(value, str) or not value.strip():
            fault = f"field {key!r} must be a non-empty string, got {value!r}"
            raise UserError(f"{where}: {fault}; correct or remove the row")
    name, text, source = map(well_formed, values.values())
    answers, supporting = map(well_formed, fields.answers), map(well_formed, map(str, fields.supporting))
    prompt = _parse_prompt(fields.prompt, text, where)
    return Question(name, text, tuple(answers), source, tuple(supporting), prompt)


def answer_warnings(questions: Sequence[Question], key: str) -> list[str]:
    """Return warnings of golden answers that look wrong; `key` is the config key of the files."""
    lines = []
    count = f"of {len(questions)} questions have a golden answer"
    if empty := [item for item in questions if not all(map(normalise_answer, item.golden_answers))]:
        example = f"{empty[0].golden_answers} of {empty[0].id!r}"
        fault = f"{key}: {len(empty)} {count} that normalises to nothing, such as {example}"
        lines.append(f"{fault}; calibadv prepare-data leaves these answers out")
    if joined := list(filter(is_joined, questions)):
        example = f"{joined[0].golden_answers[0]!r} of {joined[0].id!r}"
        fault = f"{key}: {len(joined)} {count} with a separator in it, such as {example}"
        way_out = "set data.columns.separator (calibadv prepare-data --separator)"
        lines.append(f"{fault}; if these are several answers, {way_out}")
    return lines


def is_joined(question: Question) -> bool:
    """Whether the only golden answer looks like several answers in a text."""
    return len(question.golden_answers) == 1 and bool(_JOINED.search(question.golden_answers[0]))


def _parse_prompt(value: Any, question: str, where: str) -> tuple[Message, ...]:
    """Return messages of a text or chat, split at the question."""
    if value is None or value == []:
        return ()
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    messages = []
    for item in value if isinstance(value, list) else [value]:
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            form = f"text or a list of objects with 'role' ({', '.join(ROLES)}) and a text 'content'"
            raise UserError(f"{where}: field 'prompt' must be {form}, got {str(item)[:80]!r}; remove it")
        messages.append(_message(role, tuple(well_formed(content).split(question))))
    if messages[-1].role != "user":
        fault = f"{where}: the last message of 'prompt' is of role {messages[-1].role!r}"
        raise UserError(f"{fault}; remove what follows the user's last message, which the policy answers")
    return tuple(messages)


def question_row(question: Question) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "data_source": question.data_source,
        "supporting_ids": list(question.supporting_ids),
    }
    if question.prompt:
        row["prompt"] = [
            {"role": message.role, "content": question.text.join(message.parts)}
            for message in question.prompt
        ]
    return row


def write_questions(path: Path, questions: Iterable[Question]) -> None:
    """Write a file for `load_questions`."""
    write_jsonl(path, map(question_row, questions))


def select_evenly(questions: Sequence[Question], limit: int, seed: int) -> list[Question]:
    """Return at most `limit` questions, drawn in turn from every data source, in the order of the file."""
    drawn: Counter[str] = Counter()
    ranks: list[tuple[int, str, int]] = []  # position among its data source's, data source, index
    for index in np.random.default_rng(seed).permutation(len(questions)).tolist():
        source = questions[index].data_source
        ranks.append((drawn[source], source, index))
        drawn[source] += 1
    return [questions[index] for index in sorted(index for _, _, index in sorted(ranks)[:limit])]
