"""Golden answers of a value: texts, lists, objects with aliases, lists as text, and marks for no answer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.data.row_files import OPEN_LIST, DataRow, parse_list, parse_objects

# Keys of an answer's text in published objects, in lower case without underscores, the preferred one first:
# SQuAD, ComplexWebQuestions and KILT, QAMPARI, TriviaQA, WebQSP and GrailQA, Mintaka.
TEXT_KEYS = (
    "text",
    "answer",
    "answertext",
    "value",
    "entityname",
    "label",
    "name",
    "answerargument",
    "mention",
)
# Keys of further answers that are accepted.
ALIAS_KEYS = ("aliases", "answeraliases", "alias")
# Levels of objects and lists in an answer; deeper ones are refused.
MAX_DEPTH = 6
# Answers that published files encode as 0 and 1.
NO_AND_YES = ("no", "yes")
# Marks that say that a question has no answer: MS MARCO, QuAC, TriviaQA's withheld answers, and tables.
_NO_ANSWER = re.compile(
    r"[\[<(]?(?:no[ _]?answer(?:[ _]present)?|unanswerable|not answerable|cannot[ _]?answer)[\])>]?\.?"
    r"|[\[<]unk(?:nown)?[\]>]|#?n/a",
    re.IGNORECASE,
)
_NAN = ("nan", "NaN")
# Keys of a flag -> the values, as text, that say that a question has no answer.
_FLAGS = {
    "answerable": ("false", "0"),
    "is_answerable": ("false", "0"),
    "is_impossible": ("true", "1"),
}
# Text between answers that are written as one text.
_SEPARATOR = re.compile(r"<\|?\w*(?:split|sep)\w*\|?>|\[SEP\]|<br ?/?>", re.IGNORECASE)


class NoAnswer(UserError):
    """A row without a valid answer, such as a row of a test set whose answers are withheld.

    Attributes:
        source: data_source of the row; `questions.read_questions` sets it.
    """

    source = ""


def check_answerable(row: DataRow, where: str) -> None:
    """Raise NoAnswer for a row whose flag says that its question has no answer.

    Args:
        row: Row of a question file.
        where: Place of the row, for messages.
    """
    for key, values in _FLAGS.items():
        if str(row.get(key)).lower() in values:
            flag = str(row[key]).lower()
            raise NoAnswer(f"{where}: key {key!r} is {flag}; remove the row (calibadv prepare-data does)")


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
                f"{where}: key {key!r} must be text or a list of texts, got {item!r:.80}; "
                f"{_advice(item, key)}"
            )
    return present


def _advice(item: Any, key: str) -> str:
    """Return how to read an item that is neither text nor number."""
    if not isinstance(item, Mapping) or not item:
        return "correct the row"
    keys = ", ".join(map(str, list(item)[:8]))
    return (
        f"name the key of its text, of {keys} (--answer {key}.KEY; data.columns.answer), or correct the row"
    )


def answer_texts(value: Any, where: str, key: str) -> list[str]:
    """Return the distinct golden answers of a value as texts, booleans as yes and no.

    Args:
        value: An answer or several; see `values_of`. Several may be joined by a separator such as ``<br>``.
            An object is read by `TEXT_KEYS` and `ALIAS_KEYS`.
        where: Place of the row, for messages.
        key: Key of the value, for messages.

    Raises:
        NoAnswer: There is no answer, or only a mark that says so.
        UserError: The value is not of texts, booleans and numbers.
    """
    if isinstance(value, str):
        objects = parse_objects(value)
        value = value if objects is None else objects
    answers: list[str] = []
    for answer in values_of(_without_objects(value, MAX_DEPTH), where, key):
        text = NO_AND_YES[answer] if isinstance(answer, bool) else str(answer)
        stripped = [part.strip() for part in _SEPARATOR.split(text)]
        answers += [part for part in stripped if part and not says_no_answer(part)]
    if not answers:
        raise NoAnswer(f"{where}: key {key!r} holds no answer; remove the row (calibadv prepare-data does)")
    return distinct(answers)


def says_no_answer(text: str) -> bool:
    """Return whether a text is a mark for no answer, such as "No Answer Present."."""
    return text in _NAN or _NO_ANSWER.fullmatch(text) is not None


def _without_objects(value: Any, depth: int) -> Any:
    """Return a value with each object of answers replaced by its texts; unknown objects stay."""
    if depth == 0:
        return value
    if isinstance(value, dict):
        texts = _object_texts(value, depth)
        return value if texts is None else texts
    if not isinstance(value, list | tuple):
        return value
    items: list[Any] = []
    for item in value:
        texts = _object_texts(item, depth) if isinstance(item, dict) else None
        items += [item] if texts is None else texts
    return items


def _object_texts(answer: Mapping[Any, Any], depth: int) -> list[Any] | None:
    """Return the texts and aliases of an object; None if no key of it is known."""
    fields = {str(key).lower().replace("_", ""): value for key, value in answer.items()}
    known_keys = [key for key in TEXT_KEYS if key in fields]
    if not known_keys:
        return None
    filled_keys = [key for key in known_keys if fields[key] not in (None, "", [])]
    keys = [*filled_keys[:1], *ALIAS_KEYS]
    texts: list[Any] = []
    for key in keys:
        value = _without_objects(fields.get(key), depth - 1)
        texts += value if isinstance(value, list | tuple) else [value]
    return texts


def distinct(texts: Iterable[str]) -> list[str]:
    """Return texts without repetitions, in their order."""
    return list(dict.fromkeys(texts))
