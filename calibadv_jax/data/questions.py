"""Questions: read from files of any known layout, written in ours, chosen evenly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.core.tags import well_formed
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data.files import read_rows
from calibadv_jax.data.layouts import OURS, Layout, NoAnswer, layout_of
from calibadv_jax.data.sources import Sources, find_files

ROLES = ("system", "user", "assistant")


def load_questions(sources: Sources) -> list[Question]:
    """Reads question files, each in any layout of `data.layouts`, in the order given.

    Args:
        sources: of data.train or data.eval, see `data.sources.find_files`.

    Raises:
        UserError: missing file, malformed row, no golden answer, an id used twice; with file and line.
    """
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for path, source in find_files(sources):
        before = len(questions)
        for where, question in read_questions(path, source):
            if isinstance(question, NoAnswer):
                raise question
            if question.id in seen:
                raise UserError(
                    f"{where}: id {question.id!r} was used before, at {seen[question.id]}; correct or remove"
                    " the row (calibadv prepare-data does)"
                )
            seen[question.id] = where
            questions.append(question)
        if len(questions) == before:
            raise UserError(f"{path}: no questions in it; correct data.train or data.eval")
    return questions


def read_questions(path: Path, source: str) -> Iterator[tuple[str, Question | NoAnswer]]:
    """Yields (place, question) of every row, or why it has no answer. The first row decides the layout.

    Rows of another layout than ours get the id ``DATA_SOURCE_ID``, since ids of published files repeat in
    other data sets; where they have none, their file's name and their place in it.

    Args:
        source: data_source of rows that name none.

    Raises:
        UserError: missing file or malformed row, with file and line.
    """
    layout: Layout | None = None
    prompts: dict[Message, Message] = {}  # nearly all rows share a prompt's words: kept once
    for number, (where, row) in enumerate(read_rows(path)):
        layout = layout or layout_of(row, where)
        try:
            if layout is not OURS:
                row = _as_ours(row, layout, where, source, f"{path.name.partition('.')[0]}_{number}")
            yield where, parse_question(row, where, prompts)
        except NoAnswer as reason:
            reason.source = str(row.get("data_source") or layout.source or source)
            yield where, reason


def _as_ours(row: dict[str, Any], layout: Layout, where: str, source: str, place: str) -> dict[str, Any]:
    try:
        fields = layout.read(row, where)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UserError(
            f"{where}: a value is not what {layout.name} has there ({type(error).__name__}: {error}); correct"
            " the row"
        ) from error
    source = fields.data_source or layout.source or source
    name = place if fields.id is None else fields.id
    if isinstance(name, str | int) and not isinstance(name, bool):
        name = str(name) if str(name).startswith(f"{source}_") else f"{source}_{name}"
    question = fields.question.strip() if isinstance(fields.question, str) else fields.question
    ours = {"id": name, "question": question, "golden_answers": fields.answers, "data_source": source}
    return ours | {"supporting_ids": fields.supporting, "prompt": fields.prompt}


def parse_question(
    row: dict[str, Any], where: str, prompts: dict[Message, Message] | None = None
) -> Question:
    """One row of our layout as a Question.

    Args:
        where: names the row in errors.
        prompts: messages seen before; equal ones are kept once.

    Raises:
        NoAnswer: `golden_answers` is missing, empty, or holds a blank one.
        UserError: another key is wrong.
    """
    if type(row.get("id")) is int:  # as in many published files
        row = row | {"id": str(row["id"])}
    for name in ("id", "question", "data_source"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise UserError(
                f"{where}: field {name!r} must be a non-empty string, got {row.get(name)!r}; correct or"
                " remove the row"
            )
    answers = row.get("golden_answers")
    if not isinstance(answers, list) or not answers:
        raise NoAnswer(
            f"{where}: field 'golden_answers' must be a non-empty list, got {answers!r}; correct the row, or"
            " remove it (calibadv prepare-data does)"
        )
    if not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise NoAnswer(
            f"{where}: every one of 'golden_answers' must be a non-empty string, got {answers!r}; correct the"
            " row, or remove it (calibadv prepare-data does)"
        )
    supporting = row.get("supporting_ids") or []
    if not isinstance(supporting, list):
        raise UserError(
            f"{where}: field 'supporting_ids' must be a list, got {supporting!r}; correct or remove it"
        )
    text = well_formed(row["question"])
    return Question(
        well_formed(row["id"]),
        text,
        tuple(map(well_formed, answers)),
        well_formed(row["data_source"]),
        tuple(well_formed(str(one)) for one in supporting),
        _parse_prompt(row.get("prompt"), text, where, {} if prompts is None else prompts),
    )


def _parse_prompt(
    value: Any, question: str, where: str, prompts: dict[Message, Message]
) -> tuple[Message, ...]:
    """Text or chat messages, cut where the question stands in them."""
    if value is None or value == []:
        return ()
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    messages = []
    for one in value if isinstance(value, list) else [value]:
        if (
            not isinstance(one, dict)
            or one.get("role") not in ROLES
            or not isinstance(one.get("content"), str)
        ):
            raise UserError(
                f"{where}: field 'prompt' must be text or a list of objects with 'role' ({', '.join(ROLES)})"
                f" and a text 'content', got {str(one)[:80]!r}; correct or remove it"
            )
        message = Message(one["role"], tuple(well_formed(one["content"]).split(question)))
        messages.append(prompts.setdefault(message, message))
    if messages[-1].role != "user":
        raise UserError(
            f"{where}: the last message of 'prompt' is of role {messages[-1].role!r}: the policy answers a"
            " user; remove what follows the user's last message"
        )
    return tuple(messages)


def question_row(question: Question) -> dict[str, Any]:
    """A question as a row of our layout."""
    row = {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "data_source": question.data_source,
        "supporting_ids": list(question.supporting_ids),
    }
    prompt = [{"role": one.role, "content": question.text.join(one.parts)} for one in question.prompt]
    return row | ({"prompt": prompt} if prompt else {})


def write_questions(path: Path, questions: Iterable[Question]) -> None:
    """Writes a file that `load_questions` reads."""
    write_jsonl(path, map(question_row, questions))


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
