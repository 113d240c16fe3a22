"""Layouts of question files: from a row of any published layout to id, question, answers, prompt.

The keys of a row decide its layout. Sources: Search-R1 `scripts/data_process`, verl
`examples/data_preprocess`, FlashRAG's data sets, and the data sets' own publications.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.files import OPEN_LIST, DataRow, parse_list

NO_COLUMNS = ColumnsConfig()
_MISSING = object()
# Separators of answers in a text, and marks of instructions.
_SEPARATOR = re.compile(r"<\|?\w*(?:split|sep)\w*\|?>|\[SEP\]|<br ?/?>", re.IGNORECASE)
_INSTRUCTION = re.compile(
    r"</?(?:think|search|answer|information|access|tool\w*)>|[Tt]hink step by step|\\boxed"
)
MARKER = "Question:"  # before the question in the prompts of Search-R1 and of the CalibAdv authors


class NoAnswer(UserError):
    """A row without a valid answer, such as those of a test set whose answers are withheld."""

    source = ""  # its data_source, set by `questions.read_questions`


@dataclass(frozen=True)
class Fields:
    """The fields of a row; only the answers are checked."""

    id: Any
    question: Any
    answers: list[str]
    data_source: Any = None
    supporting: list[Any] = field(default_factory=list)
    prompt: Any = None


@dataclass(frozen=True)
class Layout:
    name: str
    keys: str  # separated by spaces: rows with all of them have this layout
    read: Callable[[DataRow, str], Fields]
    source: str = ""  # data_source of rows that name none


def layout_of(row: DataRow, where: str, columns: ColumnsConfig = NO_COLUMNS) -> Layout:
    """Return the layout of the named columns, or else the first whose keys the row has; UserError if none."""
    keys = ", ".join(map(str, row)) or "none"
    if columns.question or columns.answer:
        names = columns.question or "question", columns.answer or "answer"
        for name in names:
            if _value(row, name, _MISSING) is _MISSING:
                fault = f"no key {name!r}: the keys are {keys}"
                raise UserError(f"{where}: {fault}; name another key (--question, --answer; data.columns)")
        return Layout("the layout of data.columns", "", partial(_columns, *names))
    for layout in LAYOUTS:
        if row.keys() >= set(layout.keys.split()):
            return layout
    advice = "name the columns (--question, --answer; data.columns); docs/data.md lists the known layouts"
    raise UserError(f"{where}: no known layout: the keys are {keys}; {advice}")


def without_nan(value: Any) -> Any:
    """Undo what pandas makes of numbers: NaN becomes None, a whole float an integer."""
    if isinstance(value, float):
        return None if not math.isfinite(value) else int(value) if value.is_integer() else value
    return value


def values_of(value: Any, where: str, key: str) -> list[Any]:
    """Return the items of a value or list (also as text) that are not missing; UserError for other types."""
    values: list[Any] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        elements = parse_list(item) if isinstance(item, str) else None
        if elements is None and item is value and isinstance(item, str) and OPEN_LIST.match(item):
            fault = f"key {key!r} begins as a list, but is none: {item[:80]!r}"
            raise UserError(f'{where}: {fault}; write ["first", "second"]')
        values += [item] if elements is None else elements
    values = [value for value in map(without_nan, values) if value is not None and value != ""]
    if wrong := [value for value in values if not isinstance(value, bool | str | int | float)]:
        fault = f"must be text or a list of texts, got {wrong[0]!r}"
        raise UserError(f"{where}: key {key!r} {fault}; correct the row")
    return values


def texts(value: Any, where: str, key: str) -> list[str]:
    """Return the distinct golden answers of a value as texts, booleans as yes and no; NoAnswer if none."""
    answers: list[str] = []
    for answer in values_of(value, where, key):
        text = ("no", "yes")[answer] if isinstance(answer, bool) else str(answer)
        answers += filter(None, map(str.strip, _SEPARATOR.split(text)))
    if not answers:
        raise NoAnswer(f"{where}: key {key!r} holds no answer; remove the row (calibadv prepare-data does)")
    return list(dict.fromkeys(answers))


def _verl(row: DataRow, where: str) -> Fields:
    """Search-R1, verl, SkyRL, the CalibAdv authors: the answers are in reward_model.ground_truth."""
    key = "reward_model" if row.get("reward_model") is not None else "reward_spec"
    reward, extra = row.get(key), row.get("extra_info") or {}
    if not isinstance(reward, dict) or not isinstance(extra, dict):
        raise UserError(f"{where}: {key!r} and 'extra_info' must be objects; correct the row")
    target = reward.get("ground_truth")
    if isinstance(target, dict):
        target = next((target[name] for name in ("target", *ANSWERS) if target.get(name) is not None), None)
    target = row.get("golden_answers") if target is None else target
    answers = texts(target, where, f"{key}.ground_truth.target")
    question = row.get("question") or without_nan(extra.get("question"))
    if question is None:
        question = question_of(row.get("prompt"), where)
    name, index = row.get("id"), without_nan(extra.get("index"))
    if name is None and index is not None:
        name = "_".join(str(part) for part in (extra.get("split"), index) if part is not None)
    return Fields(name, question, answers, row.get("data_source"), prompt=row.get("prompt"))


def _prompted(key: str, row: DataRow, where: str, needs_marker: bool = False) -> Fields:
    """RLinf's search agent (its prompts have a marker) and TRL: the prompt holds the question."""
    prompt = row.get("prompt")
    question = row.get("question") or question_of(prompt, where, needs_marker)
    return Fields(_id(row), question, texts(row.get(key), where, key), row.get("data_source"), prompt=prompt)


def question_of(prompt: Any, where: str, needs_marker: bool = True) -> str:
    """Return the question of a prompt: the rest of the line after the only "Question:".

    Without `needs_marker`, a prompt without "Question:" begins with the question.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    *before, text = (prompt if isinstance(prompt, str) else "").split(MARKER)
    if len(before) > 1 or (needs_marker and not before):
        fault = f"key 'question' is missing, and the prompt does not hold {MARKER!r} exactly once"
        raise UserError(f"{where}: {fault}; add the key")
    lines = [line.strip() for line in text.split("<|")[0].splitlines() if line.strip()] or [""]
    is_cut = not lines[0].endswith("?") and any(line.endswith("?") for line in lines[1:])
    if is_cut or _INSTRUCTION.search(lines[0]):
        fault = "key 'question' is missing, and in the prompt it cannot be separated from the instructions"
        raise UserError(f"{where}: {fault} ({text.strip()[:80]!r}); add the key")
    return lines[0]


def _golden(row: DataRow, where: str) -> Fields:
    """Ours and FlashRAG."""
    answers = texts(row.get("golden_answers"), where, "golden_answers")
    supporting = values_of(row.get("supporting_ids"), where, "supporting_ids")
    name, question, source, prompt = (row.get(key) for key in ("id", "question", "data_source", "prompt"))
    return Fields(name, question, answers, source, supporting, prompt)


def _musique(row: DataRow, where: str) -> Fields:
    if row.get("answerable") is False:
        raise NoAnswer(f"{where}: key 'answerable' is false; remove the row (calibadv prepare-data does)")
    answers, aliases = texts(row.get("answer"), where, "answer"), row.get("answer_aliases") or []
    answers += aliases if isinstance(aliases, list) else [aliases]
    return Fields(_id(row), row.get("question"), texts(answers, where, "answer_aliases"))


def _trivia(row: DataRow, where: str) -> Fields:
    small = {str(key).lower(): value for key, value in row.items()}
    answer = {str(key).lower(): value for key, value in (small.get("answer") or {}).items()}
    answers = texts([answer.get("value"), *(answer.get("aliases") or [])], where, "Answer")
    return Fields(small.get("questionid", small.get("question_id")), small.get("question"), answers)


def _natural(row: DataRow, where: str) -> Fields:
    """Natural Questions as published: short answers are spans of the document's tokens."""
    tokens: list[str] = str(row.get("document_text") or "").split(" ")
    if row.get("document_tokens") is not None:
        tokens = ["" if token["html_token"] else token["token"] for token in row["document_tokens"]]
    answers: list[str] = []
    for note in row.get("annotations") or []:
        for span in note.get("short_answers") or []:
            answers.append(" ".join(filter(None, tokens[span["start_token"] : span["end_token"]])))
        label = str(note.get("yes_no_answer", "NONE"))
        answers += [label.lower()] if label in ("YES", "NO") else []
    name = row.get("example_id")
    return Fields(name, row.get("question_text"), texts(answers, where, "annotations.short_answers"))


def _natural_hub(row: DataRow, where: str) -> Fields:
    """Natural Questions as the hub has them: columns of annotations, with the answers' text."""
    notes, question = row.get("annotations") or {}, row.get("question") or {}
    answers = [text for note in notes.get("short_answers") or [] for text in note.get("text") or []]
    answers += [("no", "yes")[label] for label in notes.get("yes_no_answer") or [] if label in (0, 1)]
    return Fields(_id(row), question.get("text"), texts(answers, where, "annotations.short_answers.text"))


def _columns(question: str, answer: str, row: DataRow, where: str) -> Fields:
    """Return the question and the answers of two keys; a dot in a key leads into an object."""
    text, answers = _value(row, question), _value(row, answer)
    if isinstance(text, list) and text and isinstance(text[-1], dict):  # a chat, which ends with the question
        text = text[-1].get("content")
    return Fields(_id(row), text, texts(answers, where, answer), row.get("data_source"))


def _value(row: DataRow, key: str, missing: Any = None) -> Any:
    value: Any = row
    for part in [key] if key in row else key.split("."):
        value = value.get(part, missing) if isinstance(value, dict) else missing
    return value


def _browsecomp(question: str, row: DataRow, where: str) -> Fields:
    """BrowseComp and BrowseComp-Plus, encrypted as published (openai/simple-evals) or not."""
    canary = row.get("canary")
    row = row | {key: _decrypt(row.get(key), canary) for key in (question, "answer") if canary}
    answers = texts(row.get("answer"), where, "answer")
    documents = [document["docid"] for document in row.get("gold_docs") or []]
    return Fields(row.get("query_id"), row.get(question), answers, row.get("data_source"), documents)


def _decrypt(text: Any, canary: Any) -> Any:
    """Return the text of base64 that is XORed with the canary's repeated SHA-256; other text unchanged."""
    try:
        data = base64.b64decode(text, validate=True)
        key = itertools.cycle(hashlib.sha256(str(canary).encode()).digest())
        return bytes(byte ^ mask for byte, mask in zip(data, key, strict=False)).decode()
    except (TypeError, ValueError):
        return text


def _id(row: DataRow) -> Any:
    return next((row[key] for key in IDS if row.get(key) is not None), None)


_answered = partial(_columns, "question", "answer")
IDS = ("id", "_id", "question_id", "query_id", "qid")
QUESTIONS = ("question", "Question", "query", "problem", "Prompt")
ANSWERS = ("answers", "answer", "Answer", "golden_answers", "ground_truth")
OURS = Layout("calibadv_jax, FlashRAG", "question golden_answers", _golden)
LAYOUTS = (
    Layout("verl", "reward_model", _verl),
    Layout("verl", "reward_spec", _verl),
    OURS,
    Layout("RLinf", "prompt solutions", partial(_prompted, "solutions", needs_marker=True)),
    Layout("TriviaQA", "Question Answer QuestionId", _trivia, "triviaqa"),
    Layout("TriviaQA", "question answer question_source", _trivia, "triviaqa"),
    Layout("PopQA", "question possible_answers", partial(_columns, "question", "possible_answers"), "popqa"),
    Layout("MuSiQue", "question paragraphs answerable", _musique, "musique"),
    Layout("MuSiQue", "question question_decomposition", _musique, "musique"),
    Layout("2WikiMultiHopQA", "question supporting_facts evidences", _answered, "2wikimultihopqa"),
    Layout("HotpotQA", "question supporting_facts", _answered, "hotpotqa"),
    Layout("HotpotQA", "_id question context", _answered, "hotpotqa"),  # test sets have no answer
    Layout("Natural Questions", "question_text annotations", _natural, "nq"),
    Layout("Natural Questions", "question annotations", _natural_hub, "nq"),
    Layout("FRAMES", "Prompt Answer reasoning_types", partial(_columns, "Prompt", "Answer"), "frames"),
    Layout("BrowseComp", "problem answer canary", partial(_browsecomp, "problem"), "browsecomp"),
    Layout("BrowseComp-Plus", "query query_id answer", partial(_browsecomp, "query"), "browsecomp_plus"),
    *(
        Layout("question and answer", f"{question} {answer}", partial(_columns, question, answer))
        for answer, question in itertools.product(ANSWERS, QUESTIONS)
    ),
    Layout("TRL", "prompt ground_truth", partial(_prompted, "ground_truth")),
    Layout("TRL", "prompt solution", partial(_prompted, "solution")),
    Layout("TRL", "prompt answer", partial(_prompted, "answer")),
)
