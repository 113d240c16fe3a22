"""Demonstrations for the cold start; read from JSON Lines of turns in our layout, or of chat messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import SEARCH_GRAMMAR, Grammar, parse_turn, well_formed
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.files import read_rows
from calibadv_jax.data.layouts import MARKER, question_of
from calibadv_jax.data.questions import parse_question

# Key of a row's messages -> the keys of role and text in each: OpenAI's names and ShareGPT's.
CHATS = {"messages": ("role", "content"), "conversations": ("from", "value")}
ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
}
_INFORMATION = re.compile(r"\s*<information>(.*)</information>\s*", re.DOTALL)
_DOCUMENT = re.compile(r'Doc \d+ ?\(Title: "?(.*?)"?\) ?')


@dataclass(frozen=True)
class DemoTurn:
    """A turn that the policy should write, and the reply of the retriever."""

    text: str
    documents: tuple[Document, ...] = ()
    trained: bool = True  # False: context only, not trained on
    observation: str = ""  # shown before the documents: what a tool said, or why it refused


@dataclass(frozen=True)
class Demonstration:
    question: Question
    turns: tuple[DemoTurn, ...]


def load_demonstrations(path: Path, grammar: Grammar = SEARCH_GRAMMAR) -> list[Demonstration]:
    """Read the rows of a file: a question's fields and ``turns``, or a chat's ``messages``.

    Turns are ``{"text", "documents": [{"title", "text"}], "observation"}``. Raises UserError for a missing
    file or a malformed row, with file and line.
    """
    demonstrations = []
    for where, row in read_rows(path, "demonstrations"):
        key = next((name for name in CHATS if name in row), "turns")
        parse = _parse_turns if key == "turns" else _parse_chat
        demonstrations.append(parse(row, key, where, grammar))
    if not demonstrations:
        raise UserError(f"{path}: no demonstrations in it")
    return demonstrations


def split_off(
    demonstrations: Sequence[Demonstration], share: float, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Split by question, `share` of them held out (at least one if above 0); UserError if none is left."""
    texts = list(dict.fromkeys(each.question.text for each in demonstrations))
    count = max(1, round(share * len(texts))) if share else 0
    if count and count >= len(texts):
        raise UserError(f"sft.held_out={share:g} takes all {len(texts)} questions of the file: lower it")
    chosen = {texts[index] for index in np.random.default_rng(seed).permutation(len(texts))[:count]}
    parts: tuple[list[Demonstration], list[Demonstration]] = ([], [])
    for demonstration in demonstrations:
        parts[demonstration.question.text in chosen].append(demonstration)
    return parts


def _parse_turns(row: dict[str, Any], key: str, where: str, grammar: Grammar) -> Demonstration:
    turns = row.get(key)
    if not isinstance(turns, list) or not turns:
        fault = f"field 'turns' must be a non-empty list, got {turns!r}"
        raise UserError(f"{where}: {fault}; or give 'messages' of a chat")
    parsed = tuple(_parse_turn(turn, where, grammar) for turn in turns)
    return Demonstration(parse_question(row, where), parsed)


def _parse_turn(turn: object, where: str, grammar: Grammar) -> DemoTurn:
    if not isinstance(turn, dict) or not isinstance(turn.get("text"), str) or not turn["text"].strip():
        raise UserError(f"{where}: every turn needs a non-empty 'text', got {turn!r}")
    _check_action(turn["text"], where, grammar)
    documents = turn.get("documents", [])
    if not isinstance(documents, list) or not all(
        isinstance(d, dict) and isinstance(d.get("title"), str) and isinstance(d.get("text"), str)
        for d in documents
    ):
        raise UserError(f"{where}: 'documents' must be a list of objects with 'title' and 'text'")
    observation = turn.get("observation", "")
    if not isinstance(observation, str):
        raise UserError(f"{where}: 'observation' must be a text, got {observation!r}")
    shown = tuple(Document(str(d.get("id", d["title"])), d["title"], d["text"]) for d in documents)
    return DemoTurn(well_formed(turn["text"]), shown, observation=observation)


def _check_action(text: str, where: str, grammar: Grammar) -> None:
    if parse_turn(text, "eos", grammar).kind == "invalid":
        ways = [f"<{name}> {'query' if name == 'search' else '…'} </{name}>" for name in grammar.actions]
        ways.append("<answer> answer </answer>")
        raise UserError(f"{where}: a turn must hold {' or '.join(ways)}, got {text[:80]!r}")


def _parse_chat(row: Mapping[str, Any], key: str, where: str, grammar: Grammar) -> Demonstration:
    """Take messages before the assistant's first as the prompt, and others after it as observations."""
    messages = _messages(row[key], key, where)
    roles = [role for role, _, _ in messages]
    if "assistant" not in roles:
        raise UserError(f"{where}: no message of an assistant in {key!r}; remove the row")
    begin = roles.index("assistant")
    turns: list[DemoTurn] = []
    for number, (role, text, trained) in enumerate(messages[begin:], begin):
        place = f"{where}: message {number + 1} of {key!r}"
        if role == "system":
            raise UserError(f"{place}: a system message inside the chat")
        if role == "assistant":
            if number > begin and roles[number - 1] == "assistant":
                fault = f"{place}: two messages of the assistant follow each other"
                raise UserError(f"{fault}; put what the search returned between them, or join them")
            _check_action(text := text.strip(), place, grammar)
            if not text.endswith(grammar.stop_strings):
                advice = f"remove what follows the tag in {text[-60:]!r}"
                raise UserError(f"{place}: the policy stops after its action; {advice}")
            turns.append(DemoTurn(text, trained=trained))
        else:
            match = _INFORMATION.fullmatch(text)
            observed = f"{turns[-1].observation}\n{(match.group(1) if match else text).strip()}".strip()
            turns[-1] = replace(turns[-1], observation=observed)
    text = _question_text(row, messages[:begin], key, where)
    action = parse_turn(turns[-1].text, "eos", grammar)
    question = {
        "id": where if row.get("id") is None else row["id"],
        "question": text,
        "golden_answers": row.get("golden_answers") or [action.answer or action.query or text],
        "data_source": row.get("data_source") or "demonstrations",
        "prompt": [{"role": role, "content": content} for role, content, _ in messages[:begin]],
    }
    return Demonstration(parse_question(question, where), tuple(map(_with_documents, turns)))


def _messages(value: Any, key: str, where: str) -> list[tuple[str, str, bool]]:
    """Return (role, text, whether it is trained) of every message."""
    role_key, text_key = CHATS[key]
    messages = []
    for number, item in enumerate(value if isinstance(value, list) else [], 1):
        role = ROLES.get(str(item.get(role_key))) if isinstance(item, dict) else None
        if role is None or not isinstance(item.get(text_key), str):
            form = f"an object with {role_key!r} ({', '.join(ROLES)}) and a text {text_key!r}"
            fault = f"message {number} of {key!r} must be {form}, got {str(item)[:80]!r}"
            raise UserError(f"{where}: {fault}; write a tool call as <search> query </search>")
        messages.append((role, well_formed(item[text_key]), item.get("weight", 1) != 0))
    if not messages:
        raise UserError(f"{where}: {key!r} must be a non-empty list, got {str(value)[:80]!r}")
    return messages


def _question_text(
    row: Mapping[str, Any], prompt: Sequence[tuple[str, str, bool]], key: str, where: str
) -> Any:
    if "question" in row:
        return row["question"]
    if not prompt or prompt[-1][0] != "user":
        raise UserError(f"{where}: {key!r}: the message before the assistant's first must be a user's")
    text = prompt[-1][1]
    return question_of(text, where) if text.count(MARKER) == 1 else text.strip()


def _with_documents(turn: DemoTurn) -> DemoTurn:
    """Parse documents out of an observation that lists them as the agent loop does."""
    pieces = _DOCUMENT.split(turn.observation)
    if pieces[0].strip() or len(pieces) == 1:
        return turn
    titles_and_texts = zip(pieces[1::2], pieces[2::2], strict=True)
    documents = tuple(Document(title, title, text.strip()) for title, text in titles_and_texts)
    return replace(turn, observation="", documents=documents)
