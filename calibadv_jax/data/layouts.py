"""Layouts of question files: from a row of any published layout to id, question, answers and prompt.

The keys of a row decide its layout. The layouts come from Search-R1 (`scripts/data_process`), verl
(`examples/data_preprocess`), FlashRAG's data sets, and the data sets' own publications.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.chats import as_chat, only_request
from calibadv_jax.data.golden_answers import (
    NO_AND_YES,
    answer_texts,
    undo_pandas_number,
    values_of,
)
from calibadv_jax.data.multiple_choice import (
    CHOICE_COLUMNS,
    CHOICE_KEYS,
    check_no_choices,
    gold_key,
    read_choices,
    right_choices,
    with_choices,
)
from calibadv_jax.data.row_files import DataRow

NO_COLUMNS = ColumnsConfig()
# The text before the question in the prompts of Search-R1 and of the CalibAdv authors.
MARKER = "Question:"
# Keys of a row's id, of its question and of its answers, the preferred one first.
IDS = (
    "id",
    "_id",
    "ID",
    "question_id",
    "query_id",
    "qid",
    "QuestionId",
    "task_id",
    "example_id",
    "uid",
    "uuid",
)
QUESTIONS = (
    "question",
    "Question",
    "query",
    "problem",
    "Prompt",
    "question_text",
    "RawQuestion",
    "question_stem",
    "instruction",
    "input",
)
ANSWERS = (
    "answers",
    "answer",
    "Answer",
    "golden_answers",
    "ground_truth",
    "expected_answer",
    "reference_answer",
    "final_answer",
    "Final answer",
    "gold_answers",
    "gold_answer",
    "gt_answer",
    "correct_answer",
    "Correct Answer",
    "answer_list",
    "short_answers",
    "short_answer",
    "target",
)
# Keys of chats that hold a question, and of the answers beside them.
CHATS = ("prompt", "messages", "conversations", "context_messages")
CHAT_ANSWERS = (
    "ground_truth",
    "solution",
    "answer",
    "answers",
    "label",
    "golden_answers",
    "expected_answer",
    "reference_answer",
    "target",
)

_MISSING = object()
# Keys that a message shows of a row at most.
_SHOWN_KEYS = 30
# Text that only instructions hold, and no question.
_INSTRUCTION = re.compile(
    r"</?(?:think|search|answer|information|access|tool\w*)>|[Tt]hink step by step|\\boxed"
)


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
    row_keys = ", ".join(map(str, list(row)[:_SHOWN_KEYS])) or "none"
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
    chat_key = next((key for key in CHATS if key in row), "")
    if chat_key:
        raise UserError(
            f"{where}: a chat in {chat_key!r} without golden answers: the keys are {row_keys}; name the "
            f"answers' column (--question {chat_key} --answer KEY; data.columns); demonstrations are read by "
            "sft.demonstrations"
        )
    raise UserError(
        f"{where}: no known layout: the keys are {row_keys}; name the columns "
        "(--question, --answer; data.columns); docs/data.md lists the known layouts"
    )


def question_of(prompt: Any, where: str, needs_marker: bool = True) -> str:
    """Return the question in a prompt: the rest of the line after the only "Question:".

    Args:
        prompt: A text, or a chat, whose last message of the user is taken.
        where: Place of the row, for messages.
        needs_marker: False: a prompt without "Question:" begins with the question.

    Raises:
        UserError: "Question:" is missing or occurs several times, or the question cannot be separated from
            the instructions around it.
    """
    prompt = only_request(prompt, where)
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


def _prompt_reader(answer_key: str, needs_marker: bool = False, prompt_key: str = "prompt") -> RowReader:
    """Return a reader of rows whose prompt holds the question, such as those of RLinf, TRL and slime.

    A dot in a key leads into an object.
    """

    def read(row: DataRow, where: str) -> Fields:
        prompt = _value(row, prompt_key)
        question = row.get("question") or question_of(prompt, where, needs_marker)
        answers = answer_texts(_value(row, answer_key), where, answer_key)
        return Fields(
            id=_row_id(row),
            question=question,
            answers=answers,
            data_source=row.get("data_source"),
            prompt=as_chat(prompt, has_answer=prompt_key != "prompt"),
        )

    return read


def _read_ours(row: DataRow, where: str) -> Fields:
    """Read a row of this project's own layout, or of FlashRAG's."""
    question, answers = _question_and_answers(
        row, row.get("question"), row.get("golden_answers"), where, "golden_answers"
    )
    supporting = values_of(row.get("supporting_ids"), where, "supporting_ids")
    return Fields(
        id=row.get("id"),
        question=question,
        answers=answers,
        data_source=row.get("data_source"),
        supporting=supporting,
        prompt=row.get("prompt"),
    )


def _read_musique(row: DataRow, where: str) -> Fields:
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
            answers.append(NO_AND_YES[label])
    question_text = question.get("text")
    answers = answer_texts(answers, where, "annotations.short_answers.text")
    return Fields(id=_row_id(row), question=question_text, answers=answers)


def _question_and_answers(
    row: DataRow, question: Any, answers: Any, where: str, answer_key: str
) -> tuple[Any, list[str]]:
    """Return a question and its golden answers; of multiple choice the question with its choices."""
    choices = read_choices(row)
    if not choices:
        check_no_choices(row, answers, where)
        return question, answer_texts(answers, where, answer_key)
    key = gold_key(row, answer_key)
    gold = answers if key == answer_key else row[key]
    return with_choices(question, choices), right_choices(gold, choices, where, key)


def _columns_reader(question_key: str, answer_key: str) -> RowReader:
    """Return a reader of two keys. A dot in a key leads into an object, or into each object of a list."""

    def read(row: DataRow, where: str) -> Fields:
        question = _value(row, question_key)
        if isinstance(question, list | dict):
            question = only_request(question, where)
        question, answers = _question_and_answers(row, question, _value(row, answer_key), where, answer_key)
        return Fields(id=_row_id(row), question=question, answers=answers, data_source=row.get("data_source"))

    return read


def _choices_reader(question_key: str) -> RowReader:
    """Return a reader of multiple choice; a row without choices has its answer under a usual key."""

    def read(row: DataRow, where: str) -> Fields:
        answer_key = next((key for key in (*ANSWERS, "label") if row.get(key) is not None), "answer")
        return _columns_reader(question_key, answer_key)(row, where)

    return read


def _read_instruction(row: DataRow, where: str) -> Fields:
    """Read a row of Alpaca: an instruction, perhaps with an input, and the output."""
    parts = [row.get("instruction"), row.get("input")]
    texts = [part.strip() for part in parts if isinstance(part, str) and part.strip()]
    answers = answer_texts(row.get("output"), where, "output")
    return Fields(_row_id(row), "\n".join(texts), answers, data_source=row.get("data_source"))


def _read_browsecomp_plus(row: DataRow, where: str) -> Fields:
    answers = answer_texts(row.get("answer"), where, "answer")
    documents = [document["docid"] for document in row.get("gold_docs") or []]
    return Fields(
        id=row.get("query_id"),
        question=row.get("query"),
        answers=answers,
        data_source=row.get("data_source"),
        supporting=documents,
    )


def _value(row: DataRow, key: str, missing: Any = None) -> Any:
    """Return the value of a key, or of a dotted path into objects; `missing` if there is none.

    Of a list of objects it is the list of their values.
    """
    path = [key] if key in row else key.split(".")
    value: Any = row
    for name in path:
        if isinstance(value, list):
            values = [item.get(name) for item in value if isinstance(item, dict)]
            value = values if any(item is not None for item in values) else missing
        else:
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


def _question_and_answer_layouts() -> list[Layout]:
    """Return a layout for each pair of a question's key and an answer's key."""
    layouts = []
    for answer_key in ANSWERS:
        for question_key in QUESTIONS:
            reader = _columns_reader(question_key, answer_key)
            layouts.append(Layout("question and answer", (question_key, answer_key), reader))
    return layouts


def _choice_layouts() -> list[Layout]:
    """Return a layout for each pair of a question's key and the keys of choices."""
    layouts = []
    for question_key in QUESTIONS:
        for choice_keys in (*((key,) for key in CHOICE_KEYS), *CHOICE_COLUMNS):
            reader = _choices_reader(question_key)
            layouts.append(Layout("multiple choice", (question_key, *choice_keys), reader))
    return layouts


def _chat_layouts() -> list[Layout]:
    """Return a layout for each pair of a chat's key and an answer's key."""
    layouts = []
    for chat_key in CHATS:
        for answer_key in CHAT_ANSWERS:
            reader = _prompt_reader(answer_key, prompt_key=chat_key)
            name = "TRL" if chat_key == "prompt" else "chat"
            layouts.append(Layout(name, (chat_key, answer_key), reader))
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
    Layout("BrowseComp", ("problem", "answer", "canary"), _columns_reader("problem", "answer"), "browsecomp"),
    Layout(
        "BrowseComp-ZH",
        ("Question", "Answer", "canary"),
        _columns_reader("Question", "Answer"),
        "browsecomp_zh",
    ),
    Layout("xbench", ("prompt", "answer", "canary"), _columns_reader("prompt", "answer"), "xbench"),
    Layout("BrowseComp-Plus", ("query", "query_id", "answer"), _read_browsecomp_plus, "browsecomp_plus"),
    Layout("DROP", ("question", "answers_spans"), _columns_reader("question", "answers_spans.spans"), "drop"),
    *_choice_layouts(),
    # As ARC, OpenBookQA and CommonsenseQA are published: the question is an object that holds its choices.
    Layout("multiple choice", ("question", "answerKey"), _columns_reader("question.stem", "answerKey")),
    *_question_and_answer_layouts(),
    Layout("Alpaca", ("instruction", "output"), _read_instruction),
    Layout("NeMo-RL, KILT", ("input", "output"), _columns_reader("input", "output")),
    Layout("OpenRLHF", ("input", "label"), _columns_reader("input", "label")),
    Layout(
        "NeMo Gym",
        ("responses_create_params", "expected_answer"),
        _prompt_reader("expected_answer", prompt_key="responses_create_params.input"),
    ),
    *_chat_layouts(),
)
