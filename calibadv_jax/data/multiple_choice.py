"""Multiple choice: from the letter or the number of the right choice to its text.

The choices are written behind the question, which often cannot be answered without them.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any, NamedTuple

from calibadv_jax.core.errors import UserError
from calibadv_jax.data.golden_answers import NoAnswer, undo_pandas_number
from calibadv_jax.data.row_files import DataRow, parse_list, parse_objects

# Keys of the choices: MMLU and ARC, MMLU-Pro and MedQA, HellaSwag.
CHOICE_KEYS = ("choices", "options", "endings")
# Columns that hold a choice each, in the spellings of CMMLU, MedMCQA, Social IQa and tables.
CHOICE_COLUMNS = (("A", "B"), ("opa", "opb"), ("answerA", "answerB"), ("option_a", "option_b"))
# Keys that name the right choice by its number or letter. They win over an answer that is text.
GOLD_KEYS = ("answer_index", "answer_idx", "answerKey", "cop", "correct_option", "correct_choice", "correct")
# A column for each choice: A, opa (MedMCQA), answerA (Social IQa), option_a, Option A. Group 1 is the letter.
_CHOICE_COLUMN = re.compile(r"(?:op|option|choice|answer)?[ _]?([a-j])", re.IGNORECASE)
# A label as answers have it: B, (B), B. or B). Group 1 is the label, group 2 what comes after it.
_LABELLED = re.compile(r"\(?([A-Za-z]|\d{1,2})\s*[).:]\s*(.*)|([A-Za-z]|\d{1,2})", re.DOTALL)


class Choice(NamedTuple):
    """A choice of a question."""

    label: str
    text: str


def read_choices(row: DataRow) -> list[Choice]:
    """Return the choices of a row, which may stand in its question; empty if it is no multiple choice."""
    question = row.get("question")
    for holder in (row, question if isinstance(question, Mapping) else {}):
        for key in CHOICE_KEYS:
            choices = _listed(holder.get(key))
            if len(choices) > 1:
                return _without_prefixes(choices)
    columns: dict[str, str] = {}
    for name, value in row.items():
        match = _CHOICE_COLUMN.fullmatch(str(name))
        text = _text(value)
        if match and text:
            columns.setdefault(match[1].upper(), text)
    letters = string.ascii_uppercase[: len(columns)]
    if len(columns) < 2 or set(columns) != set(letters):
        return []
    return [Choice(letter, columns[letter]) for letter in letters]


def check_no_choices(row: DataRow, gold: Any, where: str) -> None:
    """Raise UserError if a row has choices of an unknown form, and its answer only names one of them."""
    names_a_choice = isinstance(gold, int) or re.fullmatch(r"[A-Ja-j]|\d{1,2}", str(gold)) is not None
    for key in CHOICE_KEYS:
        value = row.get(key)
        if names_a_choice and isinstance(value, list | Mapping) and len(value) > 1:
            raise UserError(
                f"{where}: key {key!r} must be a list of texts, got {value!r:.80}; "
                "correct the row, or write the text of the right choice as its answer"
            )


def gold_key(row: DataRow, answer_key: str) -> str:
    """Return the key that names the right choice: one of `GOLD_KEYS`, or else the key of the answer."""
    for key in GOLD_KEYS:
        if _text(row.get(key)):
            return key
    return answer_key


def right_choices(gold: Any, choices: list[Choice], where: str, key: str) -> list[str]:
    """Return the texts of the right choices.

    Args:
        gold: The label, number (from 0) or text of the right choice, or a list of these.
        choices: The choices.
        where: Place of the row, for messages.
        key: Key of `gold`, for messages.

    Raises:
        NoAnswer: `gold` is missing; test sets have -1 or an empty text.
        UserError: `gold` names none of the choices, or two different ones.
    """
    if isinstance(gold, str):
        listed = parse_list(gold)
        gold = gold if listed is None else listed
    items = gold if isinstance(gold, list) else [gold]
    texts = []
    for item in items:
        value = undo_pandas_number(item)
        if value in (None, "", -1, "-1"):
            continue
        matches = _matches(value, choices)
        if len(matches) != 1:
            fault = "two different choices" if matches else "none of the choices"
            shown = ", ".join(f"{choice.label}: {choice.text}" for choice in choices)
            raise UserError(
                f"{where}: key {key!r} is {value!r:.80}, which names {fault} ({shown:.200}); "
                "write the text of the right choice"
            )
        texts += matches
    if not texts:
        raise NoAnswer(f"{where}: key {key!r} holds no answer; remove the row (calibadv prepare-data does)")
    return texts


def with_choices(question: Any, choices: list[Choice]) -> Any:
    """Return a question with its choices behind it; unchanged if it shows them already."""
    if not isinstance(question, str) or not question.strip():
        return question
    if all(choice.text in question for choice in choices):
        return question
    return f"{question.strip()} Choices: {'; '.join(choice.text for choice in choices)}"


def _matches(value: Any, choices: list[Choice]) -> list[str]:
    """Return the distinct texts of the choices that a value names by label, number or text."""
    by_label = {choice.label.lower(): choice.text for choice in choices}
    by_text = {choice.text.strip().lower(): choice.text for choice in choices}
    if isinstance(value, bool):
        words = ("true", "yes") if value else ("false", "no")
        named = [by_text[word] for word in words if word in by_text]
        return named[:1] or [choices[int(value)].text]
    written = str(value).strip().lower()
    texts = [by_label.get(written)]
    is_number = isinstance(value, int) or re.fullmatch(r"\d{1,3}", written) is not None
    if is_number and written not in by_label and int(written) < len(choices):
        texts.append(choices[int(written)].text)
    if not isinstance(value, int):
        texts.append(by_text.get(written))
    labelled = _LABELLED.fullmatch(written)
    if labelled and labelled[1] and not any(texts):
        text = by_label.get(labelled[1])
        is_its_text = text is not None and labelled[2].strip() in ("", text.strip().lower())
        texts.append(text if is_its_text else None)
    return list(dict.fromkeys(text for text in texts if text))


def _listed(value: Any) -> list[Choice]:
    """Return the choices of a value: texts, objects, a text for each label, or a list of each."""
    if isinstance(value, str):
        parsed = parse_list(value)
        value = parse_objects(value) if parsed is None else parsed
    if isinstance(value, Mapping):
        texts = value.get("text")
        labels = value.get("label")
        if isinstance(texts, list) and isinstance(labels, list) and len(texts) == len(labels):
            value = [{"label": label, "text": text} for label, text in zip(labels, texts, strict=True)]
        elif "text" not in value:
            value = [{"label": label, "text": text} for label, text in value.items()]
    if not isinstance(value, list):
        return []
    choices = []
    for number, item in enumerate(value[: len(string.ascii_uppercase)]):
        label = string.ascii_uppercase[number]
        if isinstance(item, Mapping):
            label = _text(item.get("label", item.get("key"))) or label
            item = item.get("text", item.get("value"))
        text = _text(item)
        if not text:
            return []
        choices.append(Choice(label, text))
    return choices


def _without_prefixes(choices: list[Choice]) -> list[Choice]:
    """Return choices without the labels that their texts begin with, as "A)21" of AQuA."""
    stripped = []
    for choice in choices:
        match = _LABELLED.fullmatch(choice.text)
        if match is None or not match[1] or match[1].upper() != choice.label or not match[2].strip():
            return choices
        stripped.append(Choice(choice.label, match[2].strip()))
    return stripped


def _text(value: Any) -> str:
    """Return a text, number or boolean as text; empty for other values."""
    value = undo_pandas_number(value)
    return str(value).strip() if isinstance(value, str | int | float) else ""
