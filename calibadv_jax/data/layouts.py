"""What the field's question files call things: from a row of any of them to id, question, answers, prompt.

A layout is recognised by the keys of a row. Facts about them: Search-R1 `scripts/data_process`, verl
`examples/data_preprocess`, FlashRAG's data sets, and the data sets' own publications.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.data.files import Row

MARKER = "Question:"  # before the question in the prompts of Search-R1 and of the CalibAdv authors


class NoAnswer(UserError):
    """A row without an answer that counts, such as those of a test set whose answers are withheld."""

    source = ""  # its data_source, set by `questions.read_questions`


@dataclass(frozen=True)
class Fields:
    """What a row says; nothing is checked but that answers are text."""

    id: Any
    question: Any
    answers: list[str]
    data_source: Any = None
    supporting: list[Any] = field(default_factory=list)
    prompt: Any = None


@dataclass(frozen=True)
class Layout:
    """One way to write a question.

    Args:
        keys: a row with all of them has this layout.
        source: data_source of rows that name none; "": the file's name decides.
    """

    name: str
    keys: frozenset[str]
    read: Callable[[Row, str], Fields]
    source: str = ""


def layout_of(row: Row, where: str) -> Layout:
    """The first layout whose keys the row has.

    Raises:
        UserError: none.
    """
    for layout in LAYOUTS:
        if layout.keys <= row.keys():
            return layout
    raise UserError(
        f"{where}: no known layout: the keys are {', '.join(map(str, row)) or 'none'}; give every row 'id',"
        " 'question', 'golden_answers' and 'data_source', or see docs/data.md for other layouts"
    )


def texts(value: Any, where: str, key: str) -> list[str]:
    """A text, a number or a list of them as a list of texts, each once, without blank ones.

    Raises:
        NoAnswer: nothing is left.
        UserError: something else.
    """
    values = value if isinstance(value, list | tuple) else [value]
    kept = []
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | int | float | None):
            raise UserError(
                f"{where}: key {key!r} must be text or a list of texts, got {one!r}; correct the row"
            )
        if one is not None and str(one).strip():
            kept.append(str(one).strip())
    if not kept:
        raise NoAnswer(f"{where}: key {key!r} holds no answer; remove the row (calibadv prepare-data does)")
    return list(dict.fromkeys(kept))


def _verl(row: Row, where: str) -> Fields:
    """Search-R1, verl, the CalibAdv authors: the answers are in reward_model.ground_truth."""
    reward, extra = row.get("reward_model"), row.get("extra_info") or {}
    if not isinstance(reward, dict) or not isinstance(extra, dict):
        raise UserError(f"{where}: 'reward_model' and 'extra_info' must be objects; correct the row")
    truth = reward.get("ground_truth")
    target = truth.get("target") if isinstance(truth, dict) else truth
    key = "reward_model.ground_truth.target"
    answers = texts(row.get("golden_answers") if target is None else target, where, key)
    question = row.get("question") or extra.get("question")
    if question is None:
        question = _question_of(row.get("prompt"), where)
    name = row.get("id")
    if name is None and extra.get("index") is not None:
        name = "_".join(str(part) for part in (extra.get("split"), extra["index"]) if part is not None)
    return Fields(name, question, answers, row.get("data_source"), prompt=row.get("prompt"))


def _rlinf(row: Row, where: str) -> Fields:
    """RLinf's search agent: one text holds the whole prompt; the question is a line of it."""
    prompt = row.get("prompt")
    question = _question_of(prompt, where).split("\n")[0].split("<|")[0].strip()
    return Fields(_id(row), question, texts(row.get("solutions"), where, "solutions"), prompt=prompt)


def _question_of(prompt: Any, where: str) -> str:
    """The question at the end of a prompt, after the only "Question:"."""
    content = prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        content = prompt[-1].get("content")
    pieces = content.split(MARKER) if isinstance(content, str) else []
    if len(pieces) != 2:
        raise UserError(
            f"{where}: key 'question' is missing, and the prompt does not hold {MARKER!r} exactly once; add"
            " the key"
        )
    return pieces[1].strip()


def _golden(row: Row, where: str) -> Fields:
    """FlashRAG, and ours with a prompt."""
    return Fields(
        row.get("id"),
        row.get("question"),
        texts(row.get("golden_answers"), where, "golden_answers"),
        row.get("data_source"),
        row.get("supporting_ids") or [],
        row.get("prompt"),
    )


def _hotpot(row: Row, where: str) -> Fields:
    return Fields(_id(row), row.get("question"), texts(row.get("answer"), where, "answer"))


def _musique(row: Row, where: str) -> Fields:
    if row.get("answerable") is False:
        raise NoAnswer(f"{where}: key 'answerable' is false; remove the row (calibadv prepare-data does)")
    answers = texts(row.get("answer"), where, "answer")
    aliases = row.get("answer_aliases") or []
    found = texts([*answers, *(aliases if isinstance(aliases, list) else [aliases])], where, "answer_aliases")
    return Fields(_id(row), row.get("question"), found)


def _trivia(row: Row, where: str) -> Fields:
    small = {str(key).lower(): value for key, value in row.items()}
    answer = {str(key).lower(): value for key, value in (small.get("answer") or {}).items()}
    found = texts([answer.get("value"), *(answer.get("aliases") or [])], where, "Answer")
    return Fields(small.get("questionid", small.get("question_id")), small.get("question"), found)


def _popqa(row: Row, where: str) -> Fields:
    answers = row.get("possible_answers")
    if isinstance(answers, str):
        try:
            answers = json.loads(answers)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: key 'possible_answers' must be a JSON list, got {answers!r}; correct the row"
            ) from error
    return Fields(_id(row), row.get("question"), texts(answers, where, "possible_answers"))


def _natural(row: Row, where: str) -> Fields:
    """Natural Questions as published: short answers are spans of the document's tokens."""
    tokens: list[str] = str(row.get("document_text") or "").split(" ")
    if row.get("document_tokens") is not None:
        tokens = ["" if one["html_token"] else one["token"] for one in row["document_tokens"]]
    found: list[str] = []
    for note in row.get("annotations") or []:
        for span in note.get("short_answers") or []:
            found.append(" ".join(filter(None, tokens[span["start_token"] : span["end_token"]])))
        said = str(note.get("yes_no_answer", "NONE"))
        found += [said.lower()] if said in ("YES", "NO") else []
    name = row.get("example_id")
    return Fields(name, row.get("question_text"), texts(found, where, "annotations.short_answers"))


def _natural_hub(row: Row, where: str) -> Fields:
    """Natural Questions as the hub has them: columns of annotations, with the answers' text."""
    notes, question = row.get("annotations") or {}, row.get("question") or {}
    found = [text for note in notes.get("short_answers") or [] for text in note.get("text") or []]
    found += [("no", "yes")[said] for said in notes.get("yes_no_answer") or [] if said in (0, 1)]
    return Fields(_id(row), question.get("text"), texts(found, where, "annotations.short_answers.text"))


def _capital(row: Row, where: str) -> Fields:
    return Fields(_id(row), row.get("Question"), texts(row.get("Answer"), where, "Answer"))


def _plain(key: str) -> Callable[[Row, str], Fields]:
    def read(row: Row, where: str) -> Fields:
        return Fields(_id(row), row.get("question"), texts(row.get(key), where, key), row.get("data_source"))

    return read


def _id(row: Row) -> Any:
    return next((row[key] for key in ("id", "_id", "question_id", "qid") if row.get(key) is not None), None)


def _layout(name: str, keys: str, read: Callable[[Row, str], Fields], source: str = "") -> Layout:
    return Layout(name, frozenset(keys.split()), read, source)


OURS = _layout("calibadv_jax", "id question golden_answers data_source", _golden)
LAYOUTS = (
    _layout("verl", "reward_model data_source", _verl),
    OURS,
    _layout("RLinf", "prompt solutions", _rlinf),
    _layout("FlashRAG", "question golden_answers", _golden),
    _layout("TriviaQA", "Question Answer QuestionId", _trivia, "triviaqa"),
    _layout("TriviaQA", "question answer question_source", _trivia, "triviaqa"),
    _layout("PopQA", "question possible_answers", _popqa, "popqa"),
    _layout("MuSiQue", "question paragraphs answerable", _musique, "musique"),
    _layout("MuSiQue", "question question_decomposition", _musique, "musique"),
    _layout("2WikiMultiHopQA", "question supporting_facts evidences", _hotpot, "2wikimultihopqa"),
    _layout("HotpotQA", "question supporting_facts", _hotpot, "hotpotqa"),
    _layout("HotpotQA", "_id question context", _hotpot, "hotpotqa"),  # test sets have no answer
    _layout("Natural Questions", "question_text annotations", _natural, "nq"),
    _layout("Natural Questions", "question annotations", _natural_hub, "nq"),
    _layout("Bamboogle", "Question Answer", _capital),
    _layout("question and answers", "question answers", _plain("answers")),
    _layout("question and answer", "question answer", _plain("answer")),
)
