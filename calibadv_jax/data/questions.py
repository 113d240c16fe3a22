"""Read questions from files of any supported layout, write them in ours, and choose some evenly."""

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
from calibadv_jax.core.tags import to_printable_line, well_formed
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data.chats import message_text
from calibadv_jax.data.encryption import decrypt_row, looks_encrypted
from calibadv_jax.data.golden_answers import NoAnswer, check_answerable, undo_pandas_number
from calibadv_jax.data.layouts import NO_COLUMNS, OUR_LAYOUT, QUESTIONS, Fields, Layout, layout_of
from calibadv_jax.data.row_files import Sources, find_files, read_rows

ROLES = ("system", "user", "assistant")
# Nearly all rows share a prompt, which is kept in memory once.
_message = lru_cache(maxsize=1024)(Message)
# A separator such as "|" or " / " between two answers.
_JOINED = re.compile(r"\S(?:\s*[|;\n]+\s*| / )\S")


def load_questions(sources: Sources, columns: ColumnsConfig = NO_COLUMNS) -> list[Question]:
    """Return the questions of files in any layout, in their order.

    Args:
        sources: Files; see `find_files`.
        columns: Keys of the question and the answers, for files of an unknown layout.

    Raises:
        UserError: A file is missing, broken or empty, or a row is malformed or repeats an id.
        NoAnswer: A row has no golden answer.
    """
    questions: list[Question] = []
    # Id of a question -> place of its row.
    places: dict[str, str] = {}
    for path, source in find_files(sources):
        num_before = len(questions)
        for where, question in read_questions(path, source, columns):
            if isinstance(question, NoAnswer):
                raise question
            if question.id in places:
                raise UserError(
                    f"{where}: id {question.id!r} was used before, at {places[question.id]}; "
                    "correct or remove the row (calibadv prepare-data does)"
                )
            places[question.id] = where
            questions.append(question)
        if len(questions) == num_before:
            raise UserError(f"{path}: no questions in it; correct data.train or data.eval")
    return questions


def read_questions(
    path: Path, source: str, columns: ColumnsConfig = NO_COLUMNS
) -> Iterator[tuple[str, Question | NoAnswer]]:
    """Yield the place of every row of a file, and its question.

    The first row decides the layout. Rows in our layout with id and data_source keep the id. Other rows get
    the id ``DATA_SOURCE_ID``, since ids of published files repeat in other data sets; a row without an id is
    named by the file's name and its number in it.

    Args:
        path: File of any format and layout.
        source: data_source of rows that name none, if their layout does not tell it either.
        columns: Keys of the question and the answers, for a file of an unknown layout.

    Yields:
        The place, for messages; and the question, or `NoAnswer` for a row without a golden answer.

    Raises:
        UserError: The file is missing or broken, or a row is malformed.
    """
    layout: Layout | None = None
    question_keys = (columns.question,) if columns.question else (*QUESTIONS, "prompt")
    for number, (where, row) in enumerate(read_rows(path)):
        row = {key: undo_pandas_number(value) for key, value in row.items()}
        row = decrypt_row(row, question_keys)
        if layout is None:
            layout = layout_of(row, where, columns)
        row_name = f"{path.name.partition('.')[0]}_{number}"
        try:
            fields = _read_fields(layout, row, where, source, row_name)
            if columns.separator:
                fields = _split_answers(fields, columns.separator)
            yield where, _question(fields, where)
        except NoAnswer as reason:
            reason.source = _name_of(str(row.get("data_source") or layout.source or source))
            yield where, reason
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise UserError(
                f"{where}: a value is not what {layout.name} has there ({type(error).__name__}: {error}); "
                "correct the row"
            ) from error


def _read_fields(layout: Layout, row: dict[str, Any], where: str, source: str, row_name: str) -> Fields:
    """Return the fields of a row, with a data_source and with an id that names it.

    `source` is the data_source of a row that names none, `row_name` the id of a row without one.
    """
    check_answerable(row, where)
    fields = layout.read(row, where)
    if layout is OUR_LAYOUT and fields.id is not None and fields.data_source:
        return fields
    source = fields.data_source or layout.source or source
    question_id = row_name if fields.id is None else fields.id
    has_plain_id = type(question_id) in (str, int)
    if has_plain_id and not str(question_id).startswith(f"{source}_"):
        question_id = f"{source}_{question_id}"
    question = fields.question
    if isinstance(question, str):
        question = question.strip()
    return replace(fields, id=question_id, question=question, data_source=source)


def _split_answers(fields: Fields, separator: str) -> Fields:
    """Return the fields with their answers split at the separator; unchanged if no answer would be left."""
    answers = []
    for text in fields.answers:
        stripped = [part.strip() for part in text.split(separator)]
        answers += [part for part in stripped if part]
    if not answers:
        return fields
    return replace(fields, answers=list(dict.fromkeys(answers)))


def parse_question(row: dict[str, Any], where: str) -> Question:
    """Return the question of a row in our layout.

    Args:
        row: Row with the keys of `question_row`.
        where: Place of the row, for messages.

    Raises:
        NoAnswer: The row has no golden answer.
        UserError: The row is malformed.
    """
    row = {key: undo_pandas_number(value) for key, value in row.items()}
    return _question(OUR_LAYOUT.read(row, where), where)


def _question(fields: Fields, where: str) -> Question:
    # Many published files number their rows.
    question_id = str(fields.id) if type(fields.id) is int else fields.id
    question_id = _checked_text("id", question_id, where)
    text = _checked_text("question", fields.question, where)
    data_source = _checked_text("data_source", fields.data_source, where)
    if looks_encrypted(text):
        raise UserError(
            f"{where}: the question is encrypted, or base64 ({text[:40]!r}); keep the column 'canary', which "
            "holds the key, or decrypt the file as its publisher says"
        )
    question_id = well_formed(question_id)
    text = well_formed(text)
    # A name of metrics and tables: a line end or a control character would break these.
    data_source = _checked_text("data_source", _name_of(data_source), where)
    answers = tuple(well_formed(answer) for answer in fields.answers)
    supporting_ids = tuple(well_formed(str(passage_id)) for passage_id in fields.supporting)
    prompt = _parse_prompt(fields.prompt, text, where)
    return Question(question_id, text, answers, data_source, supporting_ids, prompt)


def _checked_text(key: str, value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"{where}: field {key!r} must be a non-empty string, got {value!r:.80}; correct or remove the row"
        )
    return value


def _name_of(text: str) -> str:
    """Return the name of a data source as one line without control characters."""
    return to_printable_line(well_formed(text))


def answer_warnings(questions: Sequence[Question], key: str) -> list[str]:
    """Return warnings about golden answers that look wrong.

    Args:
        questions: Questions of the files of one config key.
        key: The config key, such as data.train, for messages.

    Returns:
        At most two lines: about answers that normalise to nothing, and about answers with a separator.
    """
    warnings = []
    empty = [question for question in questions if _has_empty_answer(question)]
    if empty:
        warnings.append(
            f"{key}: {len(empty)} of {len(questions)} questions have a golden answer that normalises to "
            f"nothing, such as {empty[0].golden_answers} of {empty[0].id!r}; "
            "calibadv prepare-data leaves these answers out"
        )
    joined = [question for question in questions if looks_joined(question)]
    if joined:
        warnings.append(
            f"{key}: {len(joined)} of {len(questions)} questions have a golden answer with a separator in "
            f"it, such as {joined[0].golden_answers[0]!r} of {joined[0].id!r}; "
            "if these are several answers, set data.columns.separator (calibadv prepare-data --separator)"
        )
    return warnings


def _has_empty_answer(question: Question) -> bool:
    return not all(normalise_answer(answer) for answer in question.golden_answers)


def looks_joined(question: Question) -> bool:
    """Return whether the only golden answer looks like several answers in one text."""
    if len(question.golden_answers) != 1:
        return False
    return _JOINED.search(question.golden_answers[0]) is not None


def _parse_prompt(value: Any, question: str, where: str) -> tuple[Message, ...]:
    """Return the messages of a text or a chat, each split at the question."""
    if value is None or value == []:
        return ()
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    items = value if isinstance(value, list) else [value]
    messages = []
    for item in items:
        role = item.get("role") if isinstance(item, dict) else None
        content = message_text(item)
        if role not in ROLES or not isinstance(content, str):
            raise UserError(
                f"{where}: field 'prompt' must be text or a list of objects with 'role' "
                f"({', '.join(ROLES)}) and a text 'content', got {str(item)[:80]!r}; remove it"
            )
        parts = tuple(well_formed(content).split(question))
        messages.append(_message(role, parts))
    last_role = messages[-1].role
    if last_role != "user":
        raise UserError(
            f"{where}: the last message of 'prompt' is of role {last_role!r}; "
            "remove what follows the user's last message, which the policy answers"
        )
    return tuple(messages)


def question_row(question: Question) -> dict[str, Any]:
    """Return the row of a question in our layout, as JSON values."""
    row: dict[str, Any] = {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "data_source": question.data_source,
        "supporting_ids": list(question.supporting_ids),
    }
    if question.prompt:
        messages = []
        for message in question.prompt:
            content = question.text.join(message.parts)
            messages.append({"role": message.role, "content": content})
        row["prompt"] = messages
    return row


def write_questions(path: Path, questions: Iterable[Question]) -> None:
    """Write a file for `load_questions`."""
    write_jsonl(path, map(question_row, questions))


def select_evenly(questions: Sequence[Question], limit: int, seed: int) -> list[Question]:
    """Choose questions at random, one from each data source in turn.

    Args:
        questions: Questions of any data sources.
        limit: Largest number of questions to return.
        seed: Seed of the choice.

    Returns:
        The chosen questions, in the order of `questions`.
    """
    num_drawn: Counter[str] = Counter()
    # Of each question, in random order: its number within its data source, the data source, its index.
    draws: list[tuple[int, str, int]] = []
    order = np.random.default_rng(seed).permutation(len(questions))
    for index in order.tolist():
        source = questions[index].data_source
        draws.append((num_drawn[source], source, index))
        num_drawn[source] += 1
    draws.sort()
    chosen_indices = sorted(index for _, _, index in draws[:limit])
    return [questions[index] for index in chosen_indices]
