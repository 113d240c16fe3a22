"""Layouts of question files: from a row of any published layout to id, question, answers and prompt.

The keys of a row decide its layout. The layouts come from Search-R1 (`scripts/data_process`), verl
(`examples/data_preprocess`), FlashRAG's data sets, and the data sets' own publications.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.row_files import OPEN_LIST, DataRow, parse_list

NO_COLUMNS = ColumnsConfig()
# The text before the question in the prompts of Search-R1 and of the CalibAdv authors.
MARKER = "Question:"
# Keys of a row's id, of its question and of its answers, the preferred one first.
IDS = ("id", "_id", "question_id", "query_id", "qid")
QUESTIONS = ("question", "Question", "query", "problem", "Prompt")
ANSWERS = ("answers", "answer", "Answer", "golden_answers", "ground_truth")

_MISSING = object()
# Answers that published files encode as 0 and 1.
_NO_AND_YES = ("no", "yes")
# Text between answers that are written as one text.
_SEPARATOR = re.compile(r"<\|?\w*(?:split|sep)\w*\|?>|\[SEP\]|<br ?/?>", re.IGNORECASE)
# Text that only instructions hold, and no question.
_INSTRUCTION = re.compile(
    r"</?(?:think|search|answer|information|access|tool\w*)>|[Tt]hink step by step|\\boxed"
)


class NoAnswer(UserError):
    """A row without a valid answer, such as a row of a test set whose answers are withheld.

    Attributes:
        source: data_source of the row; `questions.read_questions` sets it.
    """

    source = ""


@dataclass(frozen=True)
class Fields:
    """The fields of a row. Only the answers are checked; the others may have any type.

    Attributes:
        id: Id of the row; None if it has none.
        question: Text of the question.
        answers: Distinct golden answers, at least one.
        data_source: Data source that the row names; None if it names none.
        supporting: Corpus ids of the passages that are known to answer the question.
        prompt: Text or chat that the row wants as its prompt; None if it has none.
    """

    id: Any
    question: Any
    answers: list[str]
    data_source: Any = None
    supporting: list[Any] = field(default_factory=list)
    prompt: Any = None


# Takes a row and its place ("file:line", for messages); returns its fields.
RowReader = Callable[[DataRow, str], Fields]


@dataclass(frozen=True)
class Layout:
    """A layout of question files.

    Attributes:
        name: Name of the layout, for messages.
        keys: Rows with all of these keys have this layout.
        read: Returns the fields of a row.
        source: data_source of rows that name none; empty if the layout does not tell.
    """

    name: str
    keys: tuple[str, ...]
    read: RowReader
    source: str = ""


def layout_of(row: DataRow, where: str, columns: ColumnsConfig = NO_COLUMNS) -> Layout:
    """Return the layout of a row: that of the named columns, or else the first whose keys the row has.

    Args:
        row: Row of a question file.
        where: Place of the row, for messages.
        columns: Keys that the user names for the question and the answers; both empty: find the layout.

    Raises:
        UserError: The row lacks a named key, or has no known layout.
    """
    row_keys = ", ".join(map(str, row)) or "none"
    if columns.question or columns.answer:
        question_key = columns.question or "question"
        answer_key = columns.answer or "answer"
        for key in (question_key, answer_key):
            if _value(row, key, _MISSING) is _MISSING:
                raise UserError(
                    f"{where}: no key {key!r}: the keys are {row_keys}; "
                    "name another key (--question, --answer; data.columns)"
                )
        return Layout("the layout of data.columns", (), _columns_reader(question_key, answer_key))
    for layout in LAYOUTS:
        if row.keys() >= set(layout.keys):
            return layout
    raise UserError(
        f"{where}: no known layout: the keys are {row_keys}; name the columns "
        "(--question, --answer; data.columns); docs/data.md lists the known layouts"
    )


def undo_pandas_number(value: Any) -> Any:
    """Undo what pandas makes of numbers: NaN and infinity become None, a whole float an integer."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


def values_of(value: Any, where: str, key: str) -> list[Any]:
    """Return the items of a value that are not missing.

    Args:
        value: A single item, a list of items, or a list that is written as text; see `row_files.parse_list`.
        where: Place of the row, for messages.
        key: Key of the value, for messages.

    Returns:
        Texts, booleans and numbers, without None, NaN and empty texts.

    Raises:
        UserError: A text begins as a list but is none, or an item has another type.
    """
    items = value if isinstance(value, list | tuple) else [value]
    values: list[Any] = []
    for item in items:
        elements = parse_list(item) if isinstance(item, str) else None
        if elements is not None:
            values += elements
            continue
        if isinstance(value, str) and OPEN_LIST.match(value):
            raise UserError(
                f"{where}: key {key!r} begins as a list, but is none: {value[:80]!r}; "
                'write ["first", "second"]'
            )
        values.append(item)
    cleaned = [undo_pandas_number(item) for item in values]
    present = [item for item in cleaned if item is not None and item != ""]
    for item in present:
        if not isinstance(item, bool | str | int | float):
            raise UserError(
                f"{where}: key {key!r} must be text or a list of texts, got {item!r}; correct the row"
            )
    return present


def answer_texts(value: Any, where: str, key: str) -> list[str]:
    """Return the distinct golden answers of a value as texts, booleans as yes and no.

    Args:
        value: An answer or several; see `values_of`. Several may be joined by a separator such as ``<br>``.
        where: Place of the row, for messages.
        key: Key of the value, for messages.

    Raises:
        NoAnswer: There is no answer.
        UserError: The value is not of texts, booleans and numbers.
    """
    answers: list[str] = []
    for answer in values_of(value, where, key):
        text = _NO_AND_YES[answer] if isinstance(answer, bool) else str(answer)
        stripped = [part.strip() for part in _SEPARATOR.split(text)]
        answers += [part for part in stripped if part]
    if not answers:
        raise NoAnswer(f"{where}: key {key!r} holds no answer; remove the row (calibadv prepare-data does)")
    return _distinct(answers)


def question_of(prompt: Any, where: str, needs_marker: bool = True) -> str:
    """Return the question in a prompt: the rest of the line after the only "Question:".

    Args:
        prompt: A text, or a chat, whose last message is taken.
        where: Place of the row, for messages.
        needs_marker: False: a prompt without "Question:" begins with the question.

    Raises:
        UserError: "Question:" is missing or occurs several times, or the question cannot be separated from
            the instructions around it.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    text = prompt if isinstance(prompt, str) else ""
    *before, after = text.split(MARKER)
    if len(before) > 1 or (needs_marker and not before):
        raise UserError(
            f"{where}: key 'question' is missing, and the prompt does not hold {MARKER!r} exactly once; "
            "add the key"
        )
    # "<|" begins a control token of a chat template, such as <|im_end|>.
    message = after.split("<|")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    question = lines[0] if lines else ""
    ends_later = any(line.endswith("?") for line in lines[1:])
    is_cut_off = ends_later and not question.endswith("?")
    if is_cut_off or _INSTRUCTION.search(question):
        raise UserError(
            f"{where}: key 'question' is missing, and in the prompt it cannot be separated from the "
            f"instructions ({after.strip()[:80]!r}); add the key"
        )
    return question


def _read_verl(row: DataRow, where: str) -> Fields:
    """Read a row of Search-R1, verl, SkyRL or the CalibAdv authors.

    The answers are in reward_model.ground_truth, in SkyRL in reward_spec.ground_truth.
    """
    reward_key = "reward_model" if row.get("reward_model") is not None else "reward_spec"
    reward = row.get(reward_key)
    extra = row.get("extra_info") or {}
    if not isinstance(reward, dict) or not isinstance(extra, dict):
        raise UserError(f"{where}: {reward_key!r} and 'extra_info' must be objects; correct the row")
    target = reward.get("ground_truth")
    if isinstance(target, dict):
        target = _first_present(target, ("target", *ANSWERS))
    if target is None:
        target = row.get("golden_answers")
    answers = answer_texts(target, where, f"{reward_key}.ground_truth.target")
    question = row.get("question") or undo_pandas_number(extra.get("question"))
    if question is None:
        question = question_of(row.get("prompt"), where)
    row_id = row.get("id")
    index = undo_pandas_number(extra.get("index"))
    if row_id is None and index is not None:
        split = extra.get("split")
        row_id = str(index) if split is None else f"{split}_{index}"
    return Fields(
        id=row_id,
        question=question,
        answers=answers,
        data_source=row.get("data_source"),
        prompt=row.get("prompt"),
    )


def _prompt_reader(answer_key: str, needs_marker: bool = False) -> RowReader:
    """Return a reader of rows whose prompt holds the question, such as those of RLinf and TRL."""

    def read(row: DataRow, where: str) -> Fields:
        prompt = row.get("prompt")
        question = row.get("question") or question_of(prompt, where, needs_marker)
        answers = answer_texts(row.get(answer_key), where, answer_key)
        return Fields(
            id=_row_id(row),
            question=question,
            answers=answers,
            data_source=row.get("data_source"),
            prompt=prompt,
        )

    return read


def _read_ours(row: DataRow, where: str) -> Fields:
    """Read a row of this project's own layout, or of FlashRAG's."""
    answers = answer_texts(row.get("golden_answers"), where, "golden_answers")
    supporting = values_of(row.get("supporting_ids"), where, "supporting_ids")
    return Fields(
        id=row.get("id"),
        question=row.get("question"),
        answers=answers,
        data_source=row.get("data_source"),
        supporting=supporting,
        prompt=row.get("prompt"),
    )


def _read_musique(row: DataRow, where: str) -> Fields:
    if row.get("answerable") is False:
        raise NoAnswer(f"{where}: key 'answerable' is false; remove the row (calibadv prepare-data does)")
    answers = answer_texts(row.get("answer"), where, "answer")
    aliases = row.get("answer_aliases") or []
    answers += aliases if isinstance(aliases, list) else [aliases]
    answers = answer_texts(answers, where, "answer_aliases")
    return Fields(id=_row_id(row), question=row.get("question"), answers=answers)


def _read_trivia(row: DataRow, where: str) -> Fields:
    """Read a row of TriviaQA, whose keys are capitalised in some publications."""
    lower_row = _lower_keys(row)
    answer = _lower_keys(lower_row.get("answer") or {})
    aliases = answer.get("aliases") or []
    answers = answer_texts([answer.get("value"), *aliases], where, "Answer")
    row_id = lower_row.get("questionid", lower_row.get("question_id"))
    return Fields(id=row_id, question=lower_row.get("question"), answers=answers)


def _read_natural_questions(row: DataRow, where: str) -> Fields:
    """Read Natural Questions as published: short answers are spans of the document's tokens."""
    document_text = row.get("document_text") or ""
    document_tokens = row.get("document_tokens")
    if document_tokens is None:
        tokens = str(document_text).split(" ")
    else:
        tokens = ["" if token["html_token"] else token["token"] for token in document_tokens]
    answers: list[str] = []
    for annotation in row.get("annotations") or []:
        for span in annotation.get("short_answers") or []:
            span_tokens = tokens[span["start_token"] : span["end_token"]]
            answers.append(" ".join(token for token in span_tokens if token))
        label = str(annotation.get("yes_no_answer", "NONE"))
        if label in ("YES", "NO"):
            answers.append(label.lower())
    answers = answer_texts(answers, where, "annotations.short_answers")
    return Fields(id=row.get("example_id"), question=row.get("question_text"), answers=answers)


def _read_natural_questions_of_hub(row: DataRow, where: str) -> Fields:
    """Read Natural Questions from the HuggingFace hub: columns of annotations, with the answers' text."""
    annotations = row.get("annotations") or {}
    question = row.get("question") or {}
    answers: list[str] = []
    for short_answer in annotations.get("short_answers") or []:
        answers += short_answer.get("text") or []
    for label in annotations.get("yes_no_answer") or []:
        if label in (0, 1):
            answers.append(_NO_AND_YES[label])
    question_text = question.get("text")
    answers = answer_texts(answers, where, "annotations.short_answers.text")
    return Fields(id=_row_id(row), question=question_text, answers=answers)


def _columns_reader(question_key: str, answer_key: str) -> RowReader:
    """Return a reader of two keys. A dot in a key leads into an object."""

    def read(row: DataRow, where: str) -> Fields:
        question = _value(row, question_key)
        answers = _value(row, answer_key)
        # A chat ends with the question.
        if isinstance(question, list) and question and isinstance(question[-1], dict):
            question = question[-1].get("content")
        texts = answer_texts(answers, where, answer_key)
        return Fields(id=_row_id(row), question=question, answers=texts, data_source=row.get("data_source"))

    return read


def _browsecomp_reader(question_key: str) -> RowReader:
    """Return a reader of BrowseComp and BrowseComp-Plus, encrypted as published or not."""

    def read(row: DataRow, where: str) -> Fields:
        canary = row.get("canary")
        question = row.get(question_key)
        answer = row.get("answer")
        if canary:
            question = _decrypt(question, canary)
            answer = _decrypt(answer, canary)
        answers = answer_texts(answer, where, "answer")
        documents = [document["docid"] for document in row.get("gold_docs") or []]
        return Fields(
            id=row.get("query_id"),
            question=question,
            answers=answers,
            data_source=row.get("data_source"),
            supporting=documents,
        )

    return read


def _decrypt(text: Any, canary: Any) -> Any:
    """Return the text of base64 that is XORed with the canary's repeated SHA-256; other text unchanged.

    Source: the BrowseComp evaluation of openai/simple-evals.
    """
    try:
        encrypted = base64.b64decode(text, validate=True)
        digest = hashlib.sha256(str(canary).encode()).digest()
        key = itertools.cycle(digest)
        decrypted = bytes(byte ^ mask for byte, mask in zip(encrypted, key, strict=False))
        return decrypted.decode()
    except (TypeError, ValueError):
        return text


def _value(row: DataRow, key: str, missing: Any = None) -> Any:
    """Return the value of a key, or of a dotted path into objects; `missing` if there is none."""
    path = [key] if key in row else key.split(".")
    value: Any = row
    for name in path:
        value = value.get(name, missing) if isinstance(value, dict) else missing
    return value


def _first_present(row: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the value of the first key whose value is not None; None if there is none."""
    for key in keys:
        if row.get(key) is not None:
            return row[key]
    return None


def _row_id(row: DataRow) -> Any:
    return _first_present(row, IDS)


def _lower_keys(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key).lower(): value for key, value in row.items()}


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _question_and_answer_layouts() -> list[Layout]:
    """Return a layout for each pair of a question's key and an answer's key."""
    layouts = []
    for answer_key in ANSWERS:
        for question_key in QUESTIONS:
            reader = _columns_reader(question_key, answer_key)
            layouts.append(Layout("question and answer", (question_key, answer_key), reader))
    return layouts


_read_question_and_answer = _columns_reader("question", "answer")
OUR_LAYOUT = Layout("calibadv_jax, FlashRAG", ("question", "golden_answers"), _read_ours)
# All known layouts. The first whose keys a row has is its layout.
LAYOUTS = (
    Layout("verl", ("reward_model",), _read_verl),
    Layout("verl", ("reward_spec",), _read_verl),
    OUR_LAYOUT,
    Layout("RLinf", ("prompt", "solutions"), _prompt_reader("solutions", needs_marker=True)),
    Layout("TriviaQA", ("Question", "Answer", "QuestionId"), _read_trivia, "triviaqa"),
    Layout("TriviaQA", ("question", "answer", "question_source"), _read_trivia, "triviaqa"),
    Layout(
        "PopQA", ("question", "possible_answers"), _columns_reader("question", "possible_answers"), "popqa"
    ),
    Layout("MuSiQue", ("question", "paragraphs", "answerable"), _read_musique, "musique"),
    Layout("MuSiQue", ("question", "question_decomposition"), _read_musique, "musique"),
    Layout(
        "2WikiMultiHopQA",
        ("question", "supporting_facts", "evidences"),
        _read_question_and_answer,
        "2wikimultihopqa",
    ),
    Layout("HotpotQA", ("question", "supporting_facts"), _read_question_and_answer, "hotpotqa"),
    # HotpotQA's test sets have no answer.
    Layout("HotpotQA", ("_id", "question", "context"), _read_question_and_answer, "hotpotqa"),
    Layout("Natural Questions", ("question_text", "annotations"), _read_natural_questions, "nq"),
    Layout("Natural Questions", ("question", "annotations"), _read_natural_questions_of_hub, "nq"),
    Layout("FRAMES", ("Prompt", "Answer", "reasoning_types"), _columns_reader("Prompt", "Answer"), "frames"),
    Layout("BrowseComp", ("problem", "answer", "canary"), _browsecomp_reader("problem"), "browsecomp"),
    Layout(
        "BrowseComp-Plus", ("query", "query_id", "answer"), _browsecomp_reader("query"), "browsecomp_plus"
    ),
    *_question_and_answer_layouts(),
    Layout("TRL", ("prompt", "ground_truth"), _prompt_reader("ground_truth")),
    Layout("TRL", ("prompt", "solution"), _prompt_reader("solution")),
    Layout("TRL", ("prompt", "answer"), _prompt_reader("answer")),
)
